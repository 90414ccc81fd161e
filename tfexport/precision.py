"""Number formats of graphs and of stored weights: one row each.

To add one, add its row, its name in the type below, and the kernels that compute it.
"""

from dataclasses import dataclass
from typing import Literal

# Types of graphs: activations, caches and, unless they are quantized, weights.
Precision = Literal["fp32", "fp16", "bf16"]
# Types of quantized weights: all, and those that ONNX Runtime multiplies on CPUs.
WeightType = Literal["int8", "int4", "fp8"]
QuantizedWeights = Literal["int8", "int4"]
# What bounds the accuracy of a stage: the type of its quantized weights, otherwise that of its graph.
Accuracy = Precision | WeightType

DType = Literal["int64", "int32", "bool", "float32", "float16", "bfloat16"]


@dataclass(frozen=True)
class NumberFormat:
    """A number format.

    Attributes:
        tolerance: largest error of a logit, as a share of the largest logit, unless float32 itself loses a tenth of it.
        dtype: of tensors in graphs; None for formats of weights only.
        onnx_type: name in `onnx.TensorProto.DataType`.
        largest: number to which the largest weight of a group is scaled; -8 and -128 are not used, so that a weight and
            its negative round alike.
        qdq_opset: first opset whose DequantizeLinear reads it with float16 scales.
    """

    tolerance: float
    onnx_type: str
    dtype: DType | None = None
    largest: float = 0.0
    qdq_opset: int = 0


# float32 rounds to 6e-8 and accumulates to about 1e-6 over a deep model; float16 and bfloat16 keep 11 and 8 bits. The
# largest errors of quantized weights measured with models/dates and preset:paper-base: fp8 1e-1, int4 3e-1, int8 2e-2,
# or 5e-2 if activations are rounded to 8 bits too.
FORMATS: dict[Accuracy, NumberFormat] = {
    "fp32": NumberFormat(2e-5, "FLOAT", "float32"),
    "fp16": NumberFormat(2e-2, "FLOAT16", "float16"),
    "bf16": NumberFormat(1e-1, "BFLOAT16", "bfloat16"),
    "int8": NumberFormat(1e-1, "INT8", largest=127.0, qdq_opset=19),
    "fp8": NumberFormat(2e-1, "FLOAT8E4M3FN", largest=448.0, qdq_opset=19),
    "int4": NumberFormat(5e-1, "INT4", largest=7.0, qdq_opset=21),
}
FLOAT: dict[Precision, DType] = {
    name: number.dtype  # type: ignore[misc]
    for name, number in FORMATS.items()
    if number.dtype is not None
}
