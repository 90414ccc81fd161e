"""Weights of reference outputs: random values, sums by which tensors are recognized, and what a file leaves out."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Hashable, Mapping

import torch
from torch import Tensor, nn

from tfexport.errors import CheckpointError

# Rows of a sinusoidal table all have the same length, because sin² + cos² = 1; trained rows do not.
_EQUAL_LENGTHS = 1e-4
# Values by which a tensor is looked up.
_FIRST = 8


def randomise(module: nn.Module, generator: torch.Generator) -> None:
    """Fill every parameter and every bias buffer with random values, in place.

    Trained or freshly made weights hide mistakes: biases of 0, gains of 1, two norms that are equal. Matrices get a
    standard deviation of 1/√columns, which keeps scores and activations near 1; vectors one of 0.2 around 0, or around
    1 if they are gains. Tables of positions, masks and numbers stay. Shared parameters are drawn once.
    """
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.is_floating_point() and not (not parameter.requires_grad and is_position_table(parameter)):
                _fill(parameter, generator)
        for name, buffer in module.named_buffers():
            if buffer.is_floating_point() and _is_bias(name, buffer):
                _fill(buffer, generator)


def is_position_table(tensor: Tensor) -> bool:
    """Return whether a tensor is a sinusoidal table: two axes longer than 1, rows of equal length that differ."""
    shape = [size for size in tensor.shape if size > 1]
    if len(shape) != 2 or not bool(tensor.isfinite().all()):
        return False
    rows = tensor.detach().double().reshape(shape)
    lengths = rows.norm(dim=1)
    is_even = bool((lengths - lengths[0]).abs().max() <= _EQUAL_LENGTHS * lengths[0])
    return is_even and bool((rows[0] != rows[1]).any()) and bool((rows.abs() > 0).sum() > len(rows))


def _is_bias(name: str, buffer: Tensor) -> bool:
    """A vector of equal values is a bias before training; one number is a constant, and a matrix a mask."""
    if buffer.numel() < 2 or max(buffer.shape) != buffer.numel() or not bool(buffer.isfinite().all()):
        return False
    return name.endswith("bias") or bool((buffer == 0).all())


def _fill(tensor: Tensor, generator: torch.Generator) -> None:
    draws = torch.randn(tensor.shape, generator=generator, dtype=torch.float32)
    if max(tensor.shape, default=1) == tensor.numel():  # a vector, or one number
        tensor.copy_(0.2 * draws + bool(tensor.double().mean() > 0.5))
    else:
        tensor.copy_(draws / math.sqrt(tensor.shape[-1] if tensor.shape[-1] > 1 else tensor.shape[-2]))


# Sums: they name weights whatever file those are in.


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
    """Compare the weights of a checkpoint with those that reference outputs were recorded with.

    Args:
        recorded: sums by name; empty in files of older versions.
        tensors: of the checkpoint, by the recorded names.
        names: of the tensors that the model is made of.
        golden: name of the file of reference outputs, for messages.
        checkpoint: name of the checkpoint.

    Returns:
        A note if nothing could be compared, empty if all are equal.

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


# What a weight file leaves out: tied tensors under their other names, computed tables.


def completed(tensors: Mapping[str, Tensor], state: Mapping[str, Tensor], notes: list[str]) -> Mapping[str, Tensor]:
    """Give the weights of a file all names of a recorded state dict, with its prefix.

    The recorded parameters are random, so those that are equal are one tensor of the model, which `save_pretrained`
    stores once. Tables that the file lacks are those of `state`. `notes` receives what was added.
    """
    prefix = _prefix(tensors, state)
    found = {prefix + key: tensor for key, tensor in tensors.items()}
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
    notes += [f"tied to {other} as in the golden, not stored: {', '.join(names)}" for other, names in tied.items()]
    notes += [f"taken from the golden, not stored: {', '.join(tables)}"] if tables else []
    return found


def _prefix(keys: Collection[str], names: Collection[str]) -> str:
    """Return what is before every key in `names`; empty if that is nothing, or not the same for all."""
    first = next(iter(keys), "")
    for prefix in (name.removesuffix(first) for name in names if name.endswith(first)):
        if prefix and all(prefix + key in names for key in keys):
            return prefix
    return ""


def _look(tensor: Tensor) -> Hashable:
    """Return what equal tensors share and others hardly ever do, so that few are compared whole."""
    return tuple(tensor.shape), tensor.dtype, tuple(tensor.reshape(-1)[:_FIRST].tolist())
