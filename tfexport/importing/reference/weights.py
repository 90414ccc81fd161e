"""Randomize, compare and complete the weights of reference outputs."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Hashable, Mapping

import torch
from torch import Tensor, nn

from tfexport.errors import ParityError
from tfexport.importing._buffers import is_position_table


def randomize(module: nn.Module, generator: torch.Generator) -> None:
    """Fill every parameter and every bias buffer with random values, in place.

    Trained or new weights hide mistakes: biases of 0, gains of 1, two norms that are equal. Position tables, masks and
    constants do not change. Shared parameters are drawn once.
    """
    parameters = [p for p in module.parameters() if p.requires_grad or not is_position_table(p)]
    biases = [buffer for name, buffer in module.named_buffers() if _is_bias(name, buffer)]
    for tensor in (tensor for tensor in (*parameters, *biases) if tensor.is_floating_point()):
        _fill(tensor, generator)


def _is_bias(name: str, buffer: Tensor) -> bool:
    # A vector of zeros is a bias before training, one number is a constant, and a matrix is a mask.
    if buffer.numel() < 2 or max(buffer.shape) != buffer.numel() or not bool(buffer.isfinite().all()):
        return False
    return name.endswith("bias") or bool((buffer == 0).all())


@torch.no_grad()
def _fill(tensor: Tensor, generator: torch.Generator) -> None:
    draws = torch.randn(tensor.shape, generator=generator, dtype=torch.float32)
    if max(tensor.shape, default=1) == tensor.numel():  # a vector or one number; gains are around 1
        tensor.copy_(0.2 * draws + bool(tensor.double().mean() > 0.5))
    else:  # scores and activations stay near 1
        tensor.copy_(draws / math.sqrt(tensor.shape[-1] if tensor.shape[-1] > 1 else tensor.shape[-2]))


def _tensor_sum(tensor: Tensor) -> str:
    """Return a SHA-256 (hex) of dtype, shape and values, equal in all file formats."""
    plain = tensor.detach().cpu().contiguous()
    if plain.is_floating_point():
        # Values that float32 holds exactly have the same sum in every dtype.
        narrow = plain.float()
        plain = narrow if plain.dtype != torch.float64 or torch.equal(narrow.double(), plain) else plain
    digest = hashlib.sha256(f"{plain.dtype} {list(plain.shape)}\n".encode())
    digest.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def tensor_sums(tensors: Mapping[str, object]) -> dict[str, str]:
    """Return the checksum of every dense tensor of a state dict, by name."""
    return {
        name: _tensor_sum(value)
        for name, value in tensors.items()
        if isinstance(value, Tensor) and value.layout == torch.strided and not (value.is_quantized or value.is_nested)
    }


def joint_sum(sums: Mapping[str, str], names: Collection[str]) -> str:
    """Return one SHA-256 (hex) for the tensors called `names`."""
    return hashlib.sha256(json.dumps({name: sums[name] for name in names}, sort_keys=True).encode()).hexdigest()


def check_weights(
    recorded: Mapping[str, str], tensors: Mapping[str, Tensor], names: Collection[str], reference: str, checkpoint: str
) -> str:
    """Compare weights with recorded checksums; return a note if there are none."""
    both = [name for name in dict.fromkeys(names) if name in recorded]
    if not both:
        return f"{reference}: was written by an older version without checksums of the weights; they were not compared"
    found = tensor_sums({name: tensors[name] for name in both})
    others = [name for name in both if found[name] != recorded[name]]
    if others:
        raise ParityError(
            f"{reference}: was recorded with other weights (sha256 {joint_sum(recorded, both)}) than {checkpoint} has "
            f"(sha256 {joint_sum(found, both)}): {len(others)} of {len(both)} tensors differ, {others[0][:120]} first; "
            "record again with this checkpoint, or give the layout.yaml of the proven import as --layout"
        )
    return ""


def completed(tensors: Mapping[str, Tensor], state: Mapping[str, Tensor], notes: list[str]) -> Mapping[str, Tensor]:
    """Add the tied tensors and position tables that a weight file lacks.

    Recorded parameters are random, so equal ones are one tied tensor, which `save_pretrained` stores once.
    """
    found = dict(tensors)
    stored: dict[Hashable, list[str]] = {}
    for name in (name for name in state if name in found):
        stored.setdefault(_look(state[name]), []).append(name)
    tied: dict[str, list[str]] = {}
    tables = []
    for name in (name for name in state if name not in found):
        alike = stored.get(_look(state[name]), [])
        other = next((other for other in alike if torch.equal(state[name], state[other])), None)
        if other is not None:
            tied.setdefault(other, []).append(name)
            found[name] = found[other]
        elif is_position_table(state[name]):
            tables.append(name)
            found[name] = state[name]
    notes += [
        f"tied to {other} as in the reference outputs, not stored: {', '.join(names)}" for other, names in tied.items()
    ]
    notes += [f"taken from the reference outputs, not stored: {', '.join(tables)}"] if tables else []
    return found


def with_recorded_prefix(tensors: Mapping[str, Tensor], names: Collection[str]) -> Mapping[str, Tensor]:
    """Add the prefix that all keys have in `names`, if there is one."""
    first = next(iter(tensors), "")
    prefixes = (name.removesuffix(first) for name in names if name.endswith(first))
    prefix = next((prefix for prefix in prefixes if prefix and all(prefix + key in names for key in tensors)), "")
    return {prefix + key: tensor for key, tensor in tensors.items()} if prefix else tensors


def _look(tensor: Tensor) -> Hashable:
    """Return a key that equal tensors share and other tensors rarely share."""
    return tuple(tensor.shape), tensor.dtype, tuple(tensor.reshape(-1)[:8].tolist())
