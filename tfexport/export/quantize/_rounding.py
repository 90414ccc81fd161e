"""Round a matrix to fewer bits, with scales for outputs or blocks of inputs.

`round_matrix` is symmetric and signed, for DequantizeLinear and for 8-bit products. `round_blocks` has a zero point for
each block, which ONNX Runtime supports: at equal speed the error of 4 bits is a sixth lower.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from onnx_ir import DataType

from tfexport.precision import FORMATS, WeightType

# Inputs that share a scale in int4: the smaller of the two sizes that TensorRT is known to support.
BLOCK = 64

# Smallest scale. Subnormal numbers of float16 have fewer digits; from this value on, a scale is exact to 1/256.
_LEAST_SCALE = {"float16": 2.0**-17, "float32": 2.0**-126, "bfloat16": 2.0**-126}


class Rounded(NamedTuple):
    """Inputs and attributes of a DequantizeLinear that restores the matrix."""

    values: NDArray[Any]  # of the narrow type, [rows, columns] like the matrix
    scales: NDArray[Any]  # of the matrix's type: [outputs]; with blocks, the shape of the matrix with inputs / block
    axis: int  # of the outputs; with blocks, of the inputs
    block: int  # number of inputs that share a scale; 0 if all do


def round_matrix(matrix: NDArray[Any], weights: WeightType, outputs: int) -> Rounded:
    """Round to nearest; int4 becomes int8 if `BLOCK` does not divide the inputs."""
    inputs = 1 - outputs  # the other axis
    length = matrix.shape[inputs]
    if weights == "int4" and length % BLOCK:
        weights = "int8"
    block = BLOCK if weights == "int4" else length
    groups = matrix.astype(np.float64)
    groups = groups.reshape(*matrix.shape[:inputs], length // block, block, *matrix.shape[inputs + 1 :])
    largest = np.abs(groups).max(inputs + 1, keepdims=True) / FORMATS[weights].largest
    # Divide by the stored scale, which is rounded.
    scales = np.maximum(largest, _LEAST_SCALE[matrix.dtype.name]).astype(matrix.dtype)
    values = np.clip(groups / scales.astype(np.float64), -FORMATS[weights].largest, FORMATS[weights].largest)
    rounded = values if weights == "fp8" else np.rint(values)  # the cast to fp8 rounds
    narrow = rounded.astype(DataType[FORMATS[weights].onnx_type].numpy()).reshape(matrix.shape)
    if weights == "int4":
        return Rounded(narrow, scales.squeeze(inputs + 1), inputs, BLOCK)
    return Rounded(narrow, scales.reshape(-1), outputs, 0)


def activation_scale(largest: float, kind: WeightType, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return the scale that maps `largest` to the largest number of a type."""
    return np.array(max(largest / FORMATS[kind].largest, _LEAST_SCALE[dtype.name]), dtype)


class Blocks(NamedTuple):
    """Weights of MatMulNBits and GatherBlockQuantized: (value - zero point) · scale."""

    values: NDArray[np.uint8]  # [outputs, blocks, block · bits / 8]; the first of two values is in the low half
    scales: NDArray[np.float32]  # [outputs, blocks]
    zero_points: NDArray[np.uint8]  # [outputs, blocks · bits / 8, rounded up], packed in the same way


def round_blocks(matrix: NDArray[np.float32], bits: int, block: int) -> Blocks:
    """Round to nearest; the range of each block is its smallest to largest weight.

    The range includes 0, and 0 stays 0. `block` inputs share a scale; the last block is padded with zeros. The layout
    is documented in https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md.
    """
    largest = 2**bits - 1
    padded = np.pad(matrix, ((0, 0), (0, -matrix.shape[1] % block)))
    groups = padded.reshape(matrix.shape[0], -1, block)
    low, high = np.minimum(groups.min(2), 0), np.maximum(groups.max(2), 0)
    # Divided before they are added, because the sum of two finite numbers may be infinite.
    scales = np.maximum(high / largest - low / largest, _LEAST_SCALE["float32"]).astype(np.float32)
    zero_points = np.rint(-low / scales).clip(0, largest)
    values = np.rint(groups / scales[..., None] + zero_points[..., None]).clip(0, largest)
    return Blocks(_pack(values, bits), scales, _pack(zero_points, bits))


def _pack(values: NDArray[np.float32], bits: int) -> NDArray[np.uint8]:
    """Pack values into bytes along the last axis, the first value into the low bits."""
    narrow: NDArray[np.uint8] = values.astype(np.uint8)
    if bits == 4:
        even = np.pad(narrow, [(0, 0)] * (narrow.ndim - 1) + [(0, narrow.shape[-1] % 2)])
        narrow = even[..., 0::2] | (even[..., 1::2] << np.uint8(4))
    return narrow
