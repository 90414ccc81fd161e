"""Layers of a half-precision graph computed in float32: names, types and numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from tfexport.contract import DECODER, ENCODER
from tfexport.export.mixed import all_fp32, keep_fp32, layer_names, show_tensors, tensor_layers
from tfexport.export.passes import fix_capacity

HALF, FLOAT = TensorProto.FLOAT16, TensorProto.FLOAT


def big() -> bytes:
    """y = out · relu(up · x), whose inner values exceed float16 if x has an element above 2."""
    weights = {
        "net.up.weight": np.full((2, 2), 3e4),
        "net.up.bias": np.zeros(2),
        "net.out.weight": np.full((2, 2), 1e-4),
    }
    nodes = [
        helper.make_node("Gemm", ["x", "net.up.weight", "net.up.bias"], ["up"], name="a"),
        helper.make_node("Relu", ["up"], ["active"], name="b"),
        helper.make_node("MatMul", ["active", "net.out.weight"], ["y"], name="c"),
    ]
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", HALF, ["n", 2])],
        [helper.make_tensor_value_info("y", HALF, ["n", 2])],
        [numpy_helper.from_array(array.astype(np.float16), name) for name, array in weights.items()],
        value_info=[helper.make_tensor_value_info(name, HALF, ["n", 2]) for name in ("up", "active")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10).SerializeToString()


def run(graph: bytes, x: NDArray[np.generic]) -> list[NDArray[np.generic]]:
    onnx.checker.check_model(onnx.load_model_from_string(graph), full_check=True)
    return ort.InferenceSession(graph, providers=["CPUExecutionProvider"]).run(None, {"x": x})


X = np.array([[1, 2.0]], np.float16)


def test_values_between_two_layers_may_exceed_float16() -> None:
    assert np.isinf(run(all_fp32(big(), rounds=True), X.astype(np.float32))).all()
    (y,) = run(keep_fp32(big(), ["net.*"]), X)
    assert y.dtype == np.float16
    np.testing.assert_allclose(y, 18, rtol=1e-2)


def test_a_single_layer_is_rounded_at_its_end() -> None:
    graph, outputs = show_tensors(keep_fp32(big(), ["net.up"]), ["up", "active", "y"])
    assert outputs == {"up": "up.fp32", "active": "active.fp32", "y": "y"}
    y, _, rounded, active = run(all_fp32(graph, rounds=True), X.astype(np.float32))
    np.testing.assert_allclose(active, 9e4, rtol=1e-3)
    assert np.isinf(rounded).all()
    assert np.isinf(y).all()


def test_everything_in_float32_has_the_weights_of_float16() -> None:
    (y,) = run(all_fp32(big()), X.astype(np.float32))
    assert y.dtype == np.float32
    np.testing.assert_allclose(y, 9e4 * 2 * np.float32(np.float16(1e-4)), rtol=1e-6)


def test_layers_are_modules_and_other_operators_belong_to_the_one_before() -> None:
    assert layer_names(big()) == ["net.up", "net.out"]
    assert tensor_layers(big()) == {"up": "net.up", "active": "net.up", "y": "net.out"}


@pytest.mark.parametrize("name", [ENCODER, DECODER["concat"], DECODER["static"]])
def test_every_operator_of_an_exported_graph_is_widened(dates_fp16: Path, name: str) -> None:
    path = dates_fp16 / f"{name}.onnx"
    graph = keep_fp32(fix_capacity(path, 16) if name == DECODER["static"] else path.read_bytes(), ["*"])
    model = onnx.load_model_from_string(graph)
    types = {value.name: value.type.tensor_type.elem_type for value in (*model.graph.value_info, *model.graph.output)}
    halves = {node.op_type for node in model.graph.node if HALF in [types.get(name) for name in node.output]}
    assert halves <= {"Cast", "TensorScatter"}
    casts = [node.input[0] for node in model.graph.node if node.op_type == "Cast"]
    assert not [name for name in casts if name.startswith("past_") and DECODER["static"] in str(path)]
