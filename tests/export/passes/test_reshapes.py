"""A view of a view is one view."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort

from tfexport.export.passes import collapse_reshapes


def shape(name: str, *sizes: int) -> ir.Value:
    return ir.Value(name=name, const_value=ir.tensor(np.array(sizes), name=name))


def test_views_collapse_and_what_else_reads_one_keeps_it() -> None:
    x = ir.val("x", ir.DataType.FLOAT, ["tokens", 6])
    shapes = [shape("heads", -1, 2, 3), shape("rows", 2, -1, 2, 3), shape("flat", -1)]
    heads = ir.Node("", "Reshape", [x, shapes[0]])
    rows = ir.Node("", "Reshape", [heads.outputs[0], shapes[1]])
    flat = ir.Node("", "Reshape", [rows.outputs[0], shapes[2]])
    less = ir.Node("", "Neg", [heads.outputs[0]])
    outputs = [flat.outputs[0], less.outputs[0]]
    for value, name, sizes in zip(outputs, ("y", "z"), (["n"], ["n", 2, 3]), strict=True):
        value.name, value.type, value.shape = name, ir.TensorType(ir.DataType.FLOAT), ir.Shape(sizes)
    graph = ir.Graph(
        [x], outputs, nodes=[heads, rows, flat, less], initializers=shapes, opset_imports={"": 18}, name="g"
    )
    model = ir.Model(graph, ir_version=10)
    collapse_reshapes(model)
    assert [node.op_type for node in model.graph] == ["Reshape", "Reshape", "Neg"]
    assert flat.inputs[0] is x
    assert "rows" not in model.graph.initializers
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    tokens = np.arange(24, dtype=np.float32).reshape(4, 6)
    y, z = ort.InferenceSession(proto.SerializeToString()).run(None, {"x": tokens})
    assert np.array_equal(y, tokens.ravel())
    assert np.array_equal(z, -tokens.reshape(4, 2, 3))


def test_a_view_that_copies_a_size_of_its_input_stays() -> None:
    """A 0 in a shape means the size of that axis of the input, which another input has not."""
    x = ir.val("x", ir.DataType.FLOAT, ["tokens", 6])
    shapes = [shape("heads", -1, 2, 3), shape("first", 0, 6)]
    heads = ir.Node("", "Reshape", [x, shapes[0]])
    first = ir.Node("", "Reshape", [heads.outputs[0], shapes[1]])
    y = first.outputs[0]
    y.name, y.type, y.shape = "y", ir.TensorType(ir.DataType.FLOAT), ir.Shape(["n", 6])
    graph = ir.Graph([x], [y], nodes=[heads, first], initializers=shapes, opset_imports={"": 18}, name="g")
    model = ir.Model(graph, ir_version=10)
    collapse_reshapes(model)
    assert [node.op_type for node in model.graph] == ["Reshape", "Reshape"]
