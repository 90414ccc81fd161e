"""Multiply integers: weights with a scale for each output, activations with a scale for each row.

A row is a token, and its scale is its own: neither the other texts of a batch nor padding change what it becomes.
MatMulIntegerToFloat is described in https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

# What the largest magnitude of a row becomes, and what 0 becomes: on both sides of 128, or from 0 on where nothing is
# below it.
_SIGNED, _UNSIGNED = (127, 128), (255, 0)
_AXIS, _LEAST = "row_axis", "row_least"
# Of a row of zeros, such as padding may be.
_LEAST_MAGNITUDE = 1e-30


class RowProducts:
    """Products of one graph; an activation that several of them read is rounded once."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        # Rounding from 0 on cuts off what is below, so a ReLU before it has nothing left to do.
        self._cut = {node.output[0]: node.input[0] for node in graph.node if node.op_type == "Relu"}
        self._never_negative = {*self._cut, *(node.output[0] for node in graph.node if _ends_in_relu(node))}
        self._rounded: set[str] = set()
        self._constants: dict[str, NDArray[Any]] = {}

    def multiply(self, rows: str, values: str, scales: str, target: str, name: str) -> list[onnx.NodeProto]:
        """Write target = rows · values · scales.

        Args:
            rows: activations, float32 [..., inputs].
            values: int8 [inputs, outputs].
            scales: float32 [outputs].
            target: float32 [..., outputs].
            name: of the node that multiplies.
        """
        largest, zero = _UNSIGNED if rows in self._never_negative else _SIGNED
        unit, zero_point = f"row_unit_{largest}", f"row_zero_{zero}"
        self._constants |= {
            _AXIS: np.array([-1]),
            _LEAST: np.array(_LEAST_MAGNITUDE, np.float32),
            unit: np.array(1 / largest, np.float32),
            zero_point: np.array(zero, np.uint8),
        }
        nodes = []
        if rows not in self._rounded:
            nodes = _round(
                rows, self._cut.get(rows, rows), unit, zero_point, is_signed=rows not in self._never_negative
            )
        self._rounded.add(rows)
        product = f"{target}_of_unit_rows"
        read = [f"{rows}_rounded", values, unit, scales, zero_point]
        nodes.append(helper.make_node("MatMulIntegerToFloat", read, [product], domain="com.microsoft", name=name))
        nodes.append(helper.make_node("Mul", [product, f"{rows}_magnitude"], [target]))
        return nodes

    def constants(self) -> list[onnx.TensorProto]:
        """Return the initializers that the nodes written so far read."""
        return [numpy_helper.from_array(array, name) for name, array in self._constants.items()]


def _ends_in_relu(node: onnx.NodeProto) -> bool:
    return any(attribute.name == "activation" and attribute.s == b"Relu" for attribute in node.attribute)


def _round(rows: str, source: str, unit: str, zero_point: str, *, is_signed: bool) -> list[onnx.NodeProto]:
    """Divide each row of `source` by its largest magnitude, and round what is then 1 at most."""
    steps = [
        *([("Abs", [source], "magnitudes")] if is_signed else []),
        ("ReduceMax", [f"{rows}_magnitudes" if is_signed else source, _AXIS], "largest"),
        ("Max", [f"{rows}_largest", _LEAST], "magnitude"),
        ("Div", [source, f"{rows}_magnitude"], "unit"),
        ("QuantizeLinear", [f"{rows}_unit", unit, zero_point], "rounded"),
    ]
    return [helper.make_node(operator, read, [f"{rows}_{made}"]) for operator, read, made in steps]
