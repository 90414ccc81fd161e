"""The estimate of activations: counted by hand on small graphs, and from the arrays of a real run on exported ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from tfexport.errors import GraphError
from tfexport.export.memory import activation_bytes

SIZES = {"batch": 3, "rows": 6, "source_len": 5, "target_len": 4, "past_len": 2, "capacity": 9}
VIEWS = {"Identity", "Reshape", "Squeeze", "Unsqueeze"}


def save(path: Path, nodes: list[onnx.NodeProto], shape: list[Any], dtype: int = TensorProto.FLOAT) -> Path:
    inputs = [helper.make_tensor_value_info("x", dtype, shape)]
    graph = helper.make_graph(nodes, "g", inputs, [helper.make_tensor_value_info("y", dtype, None)])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), str(path))
    return path


def node(op: str, inputs: str, output: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op, inputs.split(), [output], **attributes)


CHAIN = [node("Relu", "x", "a"), node("Exp", "a", "b"), node("Neg", "b", "c"), node("Abs", "c", "y")]
SKIP = [node("Relu", "x", "a"), node("Exp", "a", "b"), node("Neg", "b", "c"), node("Add", "a c", "y")]
VIEW = [node("Relu", "x", "a"), node("Identity", "a", "v"), node("Exp", "x", "b"), node("Add", "v b", "y")]


@pytest.mark.parametrize(("nodes", "alive"), [(CHAIN, 2), (SKIP, 3), (VIEW, 2)])
@pytest.mark.parametrize(("dtype", "width"), [(TensorProto.FLOAT, 4), (TensorProto.FLOAT16, 2)])
def test_a_result_is_held_until_its_last_reader_and_a_view_is_no_copy(
    nodes: list[onnx.NodeProto], alive: int, dtype: int, width: int, tmp_path: Path
) -> None:
    path = save(tmp_path / "g.onnx", nodes, ["batch", 10], dtype)
    assert activation_bytes(path, {"batch": 7}) == alive * 7 * 10 * width


def run(path: Path, folder: Path) -> tuple[onnx.GraphProto, dict[str, np.ndarray[Any, Any]]]:
    model = onnx.load(str(path))
    names = [output for node in model.graph.node for output in node.output]
    known = {value.name for value in model.graph.output}
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in known)
    onnx.save(model, str(folder / "all.onnx"))
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    session = ort.InferenceSession(folder / "all.onnx", options)
    feed: dict[str, Any] = {}
    for value in session.get_inputs():
        shape = [SIZES[dim] if isinstance(dim, str) else dim for dim in value.shape]
        kind = {"tensor(int64)": np.int64, "tensor(bool)": np.bool_, "tensor(float)": np.float32}[value.type]
        feed[value.name] = np.ones(shape, kind)
    outputs = [value.name for value in session.get_outputs()]
    return model.graph, dict(zip(outputs, session.run(outputs, feed), strict=True))


def peak(graph: onnx.GraphProto, arrays: dict[str, np.ndarray[Any, Any]], outputs: set[str]) -> int:
    """Add up, at each node, whatever was made before and is read later: slow and plain."""
    shown = {node.output[0]: node.input[0] for node in graph.node if node.op_type in VIEWS}

    def owner(name: str) -> str:
        return owner(shown[name]) if name in shown else name

    made = {name: i for i, node in enumerate(graph.node) for name in node.output if name not in shown}
    read: dict[str, int] = {}
    for i, graph_node in enumerate(graph.node):
        for name in (*graph_node.input, *graph_node.output):
            read[owner(name)] = i
    most = 0
    for i, graph_node in enumerate(graph.node):
        live = [arrays[name].nbytes for name in made if name not in outputs and made[name] <= i <= read[name]]
        inner = 0
        if graph_node.op_type == "Attention":
            rows, heads, queries, _ = arrays[graph_node.input[0]].shape
            keys = arrays.get(graph_node.input[1], np.empty((0, 0, SIZES["source_len"]))).shape[2]
            inner = 2 * np.zeros((rows, heads, queries, keys), np.float32).nbytes
        most = max(most, sum(live) + inner)
    return most


@pytest.mark.parametrize("name", ["encoder", "decoder", "decoder_static"])
def test_the_memory_estimate_equals_that_of_a_run(name: str, dates_bundle: Path, tmp_path: Path) -> None:
    path = dates_bundle / f"{name}.onnx"
    outputs = {value.name for value in onnx.load(str(path), load_external_data=False).graph.output}
    graph, arrays = run(path, tmp_path)
    expected = peak(graph, arrays, outputs)
    # Of shape computations, folded away, a few numbers may be alive beside the peak.
    assert expected - 512 <= activation_bytes(path, SIZES) <= expected
    assert expected > 10_000


def test_a_missing_size_is_named(dates_bundle: Path) -> None:
    with pytest.raises(GraphError) as caught:
        activation_bytes(dates_bundle / "decoder.onnx", {"rows": 1, "batch": 1, "past_len": 0})
    expected = "decoder.onnx: dimension source_len has no size; dimension target_len has no size"
    assert str(caught.value) == expected


def test_a_size_that_depends_on_values_is_refused(tmp_path: Path) -> None:
    nodes = [node("NonZero", "x", "a"), node("Neg", "a", "b"), node("Cast", "b", "y", to=TensorProto.FLOAT)]
    with pytest.raises(GraphError, match=r"^g\.onnx: the size of 'a' depends on more than the dimensions"):
        activation_bytes(save(tmp_path / "g.onnx", nodes, ["batch", 10]), {"batch": 1})
