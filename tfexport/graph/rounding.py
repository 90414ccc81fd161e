"""Round a matrix to fewer bits: symmetric and signed, with a scale for each output or for each block of inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper

from tfexport.config import WeightType

# Inputs that share a scale in int4: the smaller of the two sizes that TensorRT is known to take.
BLOCK = 64

_TYPE = {"int8": TensorProto.INT8, "int4": TensorProto.INT4, "fp8": TensorProto.FLOAT8E4M3FN}
# The largest value; -8 and -128 are left out, so that a weight and its negative round alike.
_LARGEST = {"int8": 127.0, "int4": 7.0, "fp8": 448.0}
# Below its normal numbers float16 has fewer digits. From here on a scale is exact to 1/256, and a row of zeros has one.
_LEAST_SCALE = {"float16": 2.0**-17, "float32": 2.0**-126, "bfloat16": 2.0**-126}


@dataclass(frozen=True)
class Rounded:
    """What DequantizeLinear takes to give the matrix back, and its attributes.

    Attributes:
        values: of the narrow type, [rows, columns] like the matrix.
        scales: of the matrix's type: [outputs], or in blocks the shape of the matrix with inputs / block.
        axis: the outputs', or in blocks the inputs'.
        block: inputs that share a scale; 0 when all do.
    """

    values: NDArray[Any]
    scales: NDArray[Any]
    axis: int
    block: int


def round_matrix(matrix: NDArray[Any], weights: WeightType, outputs: int) -> Rounded:
    """Round to nearest, with the largest weight of each group as the largest value.

    Args:
        matrix: float32, float16 or bfloat16 [rows, columns], finite.
        weights: the narrow type. Where `BLOCK` does not divide the inputs, int4 becomes int8.
        outputs: the axis of the outputs, 0 or 1.
    """
    inputs = 1 - outputs
    length = matrix.shape[inputs]
    if weights == "int4" and length % BLOCK:
        weights = "int8"
    block = BLOCK if weights == "int4" else length
    groups = matrix.astype(np.float64)
    groups = groups.reshape(*matrix.shape[:inputs], length // block, block, *matrix.shape[inputs + 1 :])
    largest = np.abs(groups).max(inputs + 1, keepdims=True) / _LARGEST[weights]
    # What is divided by is the scale as it is stored.
    scales = np.maximum(largest, _LEAST_SCALE[matrix.dtype.name]).astype(matrix.dtype)
    values = np.clip(groups / scales.astype(np.float64), -_LARGEST[weights], _LARGEST[weights])
    rounded = values if weights == "fp8" else np.rint(values)  # to fp8 the cast rounds
    narrow = rounded.astype(helper.tensor_dtype_to_np_dtype(_TYPE[weights])).reshape(matrix.shape)
    if weights == "int4":
        return Rounded(narrow, scales.squeeze(inputs + 1), inputs, BLOCK)
    return Rounded(narrow, scales.reshape(-1), outputs, 0)
