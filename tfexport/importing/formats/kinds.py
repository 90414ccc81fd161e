"""Kinds of tensors: those that hold plain weights, and one line for each that does not."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_EXPECTED = "expected plain weights"


def problems(tensors: Mapping[str, Tensor], num_bytes: int) -> list[str]:
    """Say what is wrong with tensors that are no plain arrays of floating point numbers, integers or bools.

    Args:
        tensors: as they were read; no value of them is looked at.
        num_bytes: of their file; a tensor that repeats its values may not become larger than that.

    Returns:
        A line for each: its name, what it is, what is expected, and how to save it otherwise.
    """
    return [f"{key[:120]} {problem}" for key, tensor in tensors.items() if (problem := _problem(tensor, num_bytes))]


def plain(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors with every weight stored for itself, where one number stood for many."""
    return {
        key: tensor.contiguous() if tensor.is_floating_point() and _repeats(tensor) else tensor
        for key, tensor in tensors.items()
    }


def _problem(tensor: Tensor, num_bytes: int) -> str:
    problem = ""
    if tensor.is_nested:
        problem = f"is nested, rows of unequal length, {_EXPECTED}; save each row under a name of its own"
    elif tensor.layout != torch.strided:
        problem = f"is sparse ({tensor.layout}), {_EXPECTED}; save its to_dense()"
    elif tensor.is_quantized:
        problem = f"is quantised ({tensor.dtype}), {_EXPECTED}; save its dequantize()"
    elif tensor.is_meta:
        problem = f"is on the device meta and has no values, {_EXPECTED}; save the state dict of a model that is filled"
    elif tensor.is_floating_point() and tensor.dtype not in _FLOATS:
        expected = ", ".join(str(dtype).removeprefix("torch.") for dtype in _FLOATS)
        narrow = str(tensor.dtype).removeprefix("torch.")
        problem = f"is {narrow}, expected {expected}; multiply it by its scale, if it has one, and save it as bfloat16"
    elif tensor.is_floating_point() and _repeats(tensor) and tensor.numel() * tensor.itemsize > num_bytes:
        problem = (
            f"is expanded to {list(tensor.shape)}, larger than the whole file, expected values that are stored; "
            "save its contiguous()"
        )
    return problem


def _repeats(tensor: Tensor) -> bool:
    """Say whether elements share their memory, as `expand` leaves them."""
    return tensor.numel() * tensor.itemsize > tensor.untyped_storage().nbytes()
