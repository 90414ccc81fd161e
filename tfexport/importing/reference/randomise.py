"""Random weights for the copy of a model that a golden is recorded from.

Trained or freshly made weights hide mistakes: biases of 0, gains of 1, two
norms that are equal. Every parameter therefore gets its own random values, and
so does a bias kept as a buffer. What the model computes with as it is stays:
tables of positions, masks, numbers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

# Rows of a sinusoidal table all have the same length, because sin² + cos² = 1; trained rows do not.
_EQUAL_LENGTHS = 1e-4


def randomise(module: nn.Module, generator: torch.Generator) -> None:
    """Fill every parameter and every bias buffer of `module` with random values, in place.

    Matrices have a standard deviation of 1/√columns, which keeps scores and
    activations near 1; vectors of 0.2 around 0, or around 1 where they are gains.

    Args:
        module: parameters shared by several modules are drawn once and stay shared.
        generator: decides on the values.
    """
    # Parameters are listed once each, however often they are shared.
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.is_floating_point() and not (not parameter.requires_grad and is_position_table(parameter)):
                _fill(parameter, generator)
        for name, buffer in module.named_buffers():
            if buffer.is_floating_point() and _is_bias(name, buffer):
                _fill(buffer, generator)


def is_position_table(tensor: Tensor) -> bool:
    """Say whether a tensor is a sinusoidal table: two axes longer than 1, rows of equal length that differ."""
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
        is_gain = bool(tensor.double().mean() > 0.5)
        tensor.copy_(0.2 * draws + is_gain)
    else:
        tensor.copy_(draws / math.sqrt(tensor.shape[-1] if tensor.shape[-1] > 1 else tensor.shape[-2]))
