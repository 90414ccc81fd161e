"""The weight file: every graph points into it, whatever the exporter has done to a weight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from safetensors.numpy import load_file

from tfexport.export._weights import write_weights

ROWS = np.arange(10, dtype=np.float32).reshape(2, 5)


def product(weight: np.ndarray[Any, Any]) -> ir.Model:
    """Return the graph y = x · weight, twice, with the weight inside."""
    x = ir.val("x", ir.DataType.FLOAT, ["rows", weight.shape[0]])
    inner = ir.Value(name="w", const_value=ir.tensor(weight, name="w"))
    nodes = [ir.Node("", "MatMul", [x, inner], num_outputs=1) for _ in range(2)]
    for name, node in zip(("y", "z"), nodes, strict=True):
        node.outputs[0].name, node.outputs[0].type = name, ir.TensorType(ir.DataType.FLOAT)
        node.outputs[0].shape = ir.Shape(["rows", weight.shape[1]])
    outputs = [node.outputs[0] for node in nodes]
    graph = ir.Graph([x], outputs, nodes=nodes, initializers=[inner], opset_imports={"": 18}, name="g")
    return ir.Model(graph, ir_version=10)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_weight_is_stored_once_as_the_model_has_it(tmp_path: Path, transposed: bool) -> None:
    weight = torch.arange(20.0).reshape(4, 5) if transposed else torch.arange(20.0).reshape(5, 4)
    used = weight.numpy().T.copy() if transposed else weight.numpy()
    models = [product(used), product(used)]
    write_weights(tmp_path / "weights.safetensors", {"fc.weight": weight}, models)
    assert np.array_equal(load_file(tmp_path / "weights.safetensors")["fc.weight"], weight.numpy())
    for number, model in enumerate(models):
        path = tmp_path / f"{number}.onnx"
        ir.save(model, path)
        onnx.checker.check_model(str(path), full_check=True)
        (stored,) = onnx.load(str(path), load_external_data=False).graph.initializer
        assert stored.data_location == onnx.TensorProto.EXTERNAL
        for found in ort.InferenceSession(path).run(None, {"x": ROWS}):
            assert np.array_equal(found, ROWS @ used)


def test_a_constant_that_is_no_parameter_stays_in_the_graph(tmp_path: Path) -> None:
    constant = np.ones((5, 4), np.float32)
    model = product(constant)
    write_weights(tmp_path / "weights.safetensors", {"fc.weight": torch.zeros(4, 5)}, [model])
    ir.save(model, tmp_path / "g.onnx")
    (stored,) = onnx.load(str(tmp_path / "g.onnx"), load_external_data=False).graph.initializer
    assert np.array_equal(onnx.numpy_helper.to_array(stored), constant)
