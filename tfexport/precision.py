"""Number formats of graphs and of stored weights, one row each."""

from dataclasses import dataclass
from typing import Literal

# Of activations, caches and weights that are not quantized.
Precision = Literal["fp32", "fp16", "bf16"]
# Of quantized weights: all, and those that ONNX Runtime multiplies on CPUs.
WeightType = Literal["int8", "int4", "fp8"]
QuantizedWeights = Literal["int8", "int4"]
# Of weights and activations with calibrated scales, in graphs of fp16 for TensorRT.
CalibratedPrecision = Literal["w8a8", "fp8"]
CALIBRATED: dict[CalibratedPrecision, WeightType] = {"w8a8": "int8", "fp8": "fp8"}
# How the scales of activations are chosen.
CalibrationMethod = Literal["minmax", "percentile", "entropy"]
# A stage's accuracy is bounded by its quantized numbers, or if it has none, by its graph's precision.
Quantized = WeightType | CalibratedPrecision
Accuracy = Precision | Quantized

DType = Literal["int64", "int32", "bool", "float32", "float16", "bfloat16"]
ITEM_BYTES: dict[DType, int] = {"int64": 8, "int32": 4, "bool": 1, "float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class NumberFormat:
    """A number format."""

    # Largest error of a logit, as a share of the largest logit, unless float32 itself loses a tenth of it.
    tolerance: float
    onnx_type: str  # in `onnx.TensorProto.DataType`
    dtype: DType | None = None  # of tensors in graphs; None for weights only
    # Value of a group's largest weight. -8 and -128 are not used, so that a weight and its negative round alike.
    largest: float = 0.0
    qdq_opset: int = 0  # first opset whose DequantizeLinear reads it with float16 scales


# float32 rounds to 6e-8 and accumulates to about 1e-6 over a deep model; float16 and bfloat16 keep 11 and 8 bits. The
# largest errors of quantized weights measured with models/dates and preset:paper-base: fp8 1e-1, int4 3e-1, int8 2e-2,
# or 5e-2 if activations are rounded to 8 bits too.
FORMATS: dict[Accuracy, NumberFormat] = {
    "fp32": NumberFormat(2e-5, "FLOAT", "float32"),
    "fp16": NumberFormat(2e-2, "FLOAT16", "float16"),
    "bf16": NumberFormat(1e-1, "BFLOAT16", "bfloat16"),
    "int8": NumberFormat(1e-1, "INT8", largest=127.0, qdq_opset=19),
    "w8a8": NumberFormat(2e-1, "INT8"),
    "fp8": NumberFormat(2e-1, "FLOAT8E4M3FN", largest=448.0, qdq_opset=19),
    "int4": NumberFormat(5e-1, "INT4", largest=7.0, qdq_opset=21),
}
FLOAT: dict[Precision, DType] = {
    name: row.dtype  # type: ignore[misc]
    for name, row in FORMATS.items()
    if row.dtype is not None
}
