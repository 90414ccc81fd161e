"""Sums of tensors: they name weights whatever file those are in, and find a golden that was changed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from tfexport.errors import CheckpointError


def tensor_sum(tensor: Tensor) -> str:
    """Return the sha256 (hex) of a tensor's type, shape and values, which no file format changes.

    Numbers of 16 bits count as the float32 that they become when a model loads them, and so do numbers of 64 that
    float32 holds exactly.
    """
    plain = tensor.detach().cpu().contiguous()
    if plain.is_floating_point():
        narrow = plain.float()
        plain = narrow if plain.dtype != torch.float64 or torch.equal(narrow.double(), plain) else plain
    digest = hashlib.sha256(f"{plain.dtype} {list(plain.shape)}\n".encode())
    digest.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def tensor_sums(tensors: Mapping[str, object]) -> dict[str, str]:
    """Return the sum of every tensor of a state dict that has values of its own, by name."""
    return {
        name: tensor_sum(value)
        for name, value in tensors.items()
        if isinstance(value, Tensor) and value.layout == torch.strided and not (value.is_quantized or value.is_nested)
    }


def joint_sum(sums: Mapping[str, str], names: Collection[str]) -> str:
    """Return one sha256 (hex) for the tensors called `names`."""
    return hashlib.sha256(json.dumps({name: sums[name] for name in names}, sort_keys=True).encode()).hexdigest()


def check_weights(
    recorded: Mapping[str, str], tensors: Mapping[str, Tensor], names: Collection[str], golden: str, checkpoint: str
) -> str:
    """Compare the weights of a checkpoint with those that a golden was recorded with.

    Args:
        recorded: the golden's sums; empty in goldens from before there were such.
        tensors: of the checkpoint, by the names that the golden has.
        names: of the tensors that the model is made of.
        golden: what the golden is called, for messages.
        checkpoint: what the checkpoint is called.

    Returns:
        What to say where nothing could be compared, empty where all are equal.

    Raises:
        CheckpointError: they are other weights.
    """
    both = [name for name in dict.fromkeys(names) if name in recorded]
    if not both:
        return f"{golden}: has no sums of this checkpoint's weights, as older goldens; they were not compared"
    found = tensor_sums({name: tensors[name] for name in both})
    others = [name for name in both if found[name] != recorded[name]]
    if others:
        raise CheckpointError(
            f"{golden}: was recorded with other weights (sha256 {joint_sum(recorded, both)}) than {checkpoint} has "
            f"(sha256 {joint_sum(found, both)}): {len(others)} of {len(both)} tensors differ, {others[0][:120]} first; "
            "record a golden with this checkpoint loaded, or give the layout.yaml of the import that this one has "
            "proven as --layout, without --golden"
        )
    return ""
