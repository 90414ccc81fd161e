"""Read the weights of a bundle: float32, or 8-bit integers and scales."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tfexport.errors import BundleError
from tfexport.runtime.cpu import tensor_header
from tfexport.runtime.native._library import TensorView

_DTYPES = {"F32": np.float32, "U8": np.uint8, "I8": np.int8}
# Inputs that share a scale of activations, if all inputs share a scale of weights and their number is a multiple.
_BLOCK = 128
# Widths of blocks are multiples of it.
_STEP = 16


@dataclass(frozen=True)
class Tensor:
    """float32 [rows, columns], or with scales (values - zeros) · scales.

    With scales, `values` are [rows, blocks · block], and `scales` and `zeros` [rows, blocks]. The library reads rows of
    a table in these arrays, and copies others.
    """

    columns: int
    values: NDArray[Any]
    scales: NDArray[np.float32] | None = None
    zeros: NDArray[np.uint8] | None = None
    block: int = 0
    is_table: bool = False

    def view(self) -> TensorView:
        """Return the pointers; the arrays must outlive them."""
        scales, zeros = (None if array is None else array.ctypes.data for array in (self.scales, self.zeros))
        return TensorView(self.values.ctypes.data, scales, zeros, len(self.values), self.columns, self.block)


class Weights:
    """The tensors of a weight file, by their names in the model."""

    def __init__(self, path: Path) -> None:
        self._path, (self._begin, self._header) = path, tensor_header(path)

    def vector(self, name: str) -> Tensor:
        """Return a vector as a tensor of one row."""
        values = self._read(name)
        return Tensor(values.size, values.reshape(1, -1))

    def matrix(self, name: str, inputs: int, *, is_table: bool = False) -> Tensor:
        """Return a matrix [outputs, inputs]; tables are stored in blocks."""
        if not is_table and f"{name}.int8_columns.values" in self._header:
            return _from_columns(*(self._read(f"{name}.int8_columns.{part}") for part in ("values", "scales")))
        if f"{name}.int8_blocks.values" in self._header:
            parts = (self._read(f"{name}.int8_blocks.{part}") for part in ("values", "scales", "zero_points"))
            values, scales, zeros = parts
            return Tensor(inputs, values.reshape(len(values), -1), scales, zeros, values.shape[2], is_table)
        values = self._read(name)
        return Tensor(values.shape[1], values, is_table=is_table)

    def has(self, name: str) -> bool:
        """Return whether the file has a tensor or its integers."""
        return any(name + suffix in self._header for suffix in ("", ".int8_blocks.values", ".int8_columns.values"))

    def _read(self, name: str) -> NDArray[Any]:
        try:
            entry = self._header[name]
            dtype, shape, (begin, end) = np.dtype(_DTYPES[entry["dtype"]]), entry["shape"], entry["data_offsets"]
            assert math.prod(shape) * dtype.itemsize == end - begin
            # Tables stay mapped, so that processes share them, and lookups load what they read.
            found = np.memmap(self._path, dtype, "r", self._begin + begin, tuple(shape))
            return np.require(found, requirements="A")
        except (KeyError, ValueError, TypeError, AssertionError):
            raise BundleError(
                f"{self._path}: has no tensor {name} that this backend can read; use --backend ort"
            ) from None


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Join the outputs of matrices with equal inputs."""
    first = tensors[0]
    if first.scales is None:
        return Tensor(first.columns, np.concatenate([tensor.values for tensor in tensors]))
    values, scales, zeros = (
        np.concatenate([getattr(tensor, part) for tensor in tensors]) for part in ("values", "scales", "zeros")
    )
    return Tensor(first.columns, values, scales, zeros, first.block)


def _from_columns(values: NDArray[np.int8], scales: NDArray[np.float32]) -> Tensor:
    inputs, outputs = values.shape
    block = _BLOCK if inputs % _BLOCK == 0 else -(-inputs // _STEP) * _STEP
    padded = np.zeros((outputs, -(-inputs // block) * block), np.uint8)
    padded[:, :inputs] = values.T.view(np.uint8)
    padded[:, :inputs] ^= 128  # plus 128
    blocks = padded.shape[1] // block
    zeros = np.full((outputs, blocks), 128, np.uint8)
    return Tensor(inputs, padded, scales[:, None].repeat(blocks, 1), zeros, block)
