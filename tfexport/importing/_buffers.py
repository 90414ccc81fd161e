"""Recognize tensors of a state dict that are not weights."""

from __future__ import annotations

import re

import torch
from torch import Tensor

# Rows of a sinusoidal table all have the same length, because sin² + cos² = 1; trained rows do not.
_EQUAL_LENGTHS = 1e-4
_ROTARY = re.compile(r"(?<![a-z])(rotary|rope|freqs?|inv|cos|sin|cis|alibi|slopes?)(?![a-z])", re.IGNORECASE)
_PACKED = re.compile(r"weight|packed|quant|zeros", re.IGNORECASE)  # integers of quantized weights


def buffer_kind(key: str, tensor: Tensor) -> str:
    """Return the kind of a constant buffer; empty if the tensor may be a weight."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return "" if _PACKED.search(key) and tensor.dtype != torch.bool else "integers or flags"
    if tensor.numel() < 2:
        return "single number"
    if _is_rotary(key, tensor):
        return "rotary positions"
    if is_causal_mask(tensor):
        return "causal mask"
    return "position table" if _is_sinusoid(tensor) else ""


def is_causal_mask(tensor: Tensor) -> bool:
    """Return whether a square matrix has one value only above its diagonal."""
    rows, columns = tensor.shape[-2:] if tensor.dim() > 1 else (0, 1)
    if rows != columns or rows < 2 or tensor.numel() != rows * columns:
        return False
    square = tensor.reshape(rows, columns)
    below, above = square[0, 0], square[0, 1]
    # Read the whole matrix only if its corners look like those of a mask.
    is_likely = bool(below != above) and bool(below == square[-1, 0])
    return is_likely and torch.equal(square, torch.where(torch.ones_like(square).tril() > 0, below, above))


def is_position_table(tensor: Tensor) -> bool:
    """Return whether a tensor is a sinusoidal table: different rows of equal length."""
    shape = [size for size in tensor.shape if size > 1]
    if len(shape) != 2 or not bool(tensor.isfinite().all()):
        return False
    rows = tensor.detach().double().reshape(shape)
    lengths = rows.norm(dim=1)
    is_even = bool((lengths - lengths[0]).abs().max() <= _EQUAL_LENGTHS * lengths[0])
    return is_even and bool((rows[0] != rows[1]).any()) and bool((rows.abs() > 0).sum() > len(rows))


def _is_rotary(key: str, tensor: Tensor) -> bool:
    if not _ROTARY.search(key) or key.endswith((".weight", ".bias")):
        return False
    if tensor.is_complex():
        return True
    if tensor.squeeze().dim() == 1:  # frequencies or slopes rise or fall
        steps = tensor.squeeze().diff()
        return bool((steps > 0).all() or (steps < 0).all())
    # Angles, sines and cosines begin with those of position 0.
    first = tensor.reshape(-1, tensor.shape[-1])[0]
    return bool(((first == 0) | (first == 1)).all())


def _is_sinusoid(tensor: Tensor) -> bool:
    shape = [size for size in tensor.shape if size > 1]
    if len(shape) != 2 or tensor.is_complex():
        return False
    rows = tensor.double().reshape(shape)
    rows = rows[(rows != 0).any(1)]  # some implementations set the row of padding to 0
    # Rows of normalized embeddings have the length 1.
    return len(rows) > 1 and is_position_table(rows) and abs(2 * float(rows[0].square().sum()) / shape[1] - 1) < 1e-3
