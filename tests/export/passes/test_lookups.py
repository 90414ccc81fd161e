"""A table that is looked up in and multiplied with has two names in the graph and lies in the file once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch

from tfexport.export._graph_file import span
from tfexport.export._weights import write_weights
from tfexport.export.passes import separate_lookups

ROWS, WIDTH = 7, 4
TABLE = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
IDS = np.array([3, 0, 6])


def graph(*, looked_up: bool = True, multiplied: bool = True) -> ir.Model:
    """Multiply what is looked up, or else itself, with the rows of a table."""
    ids = ir.val("ids", ir.DataType.INT64, ["tokens"])
    table, other = (
        ir.Value(name=name, const_value=ir.tensor(array, name=name))
        for name, array in (("table", TABLE.numpy()), ("other", TABLE.numpy() + 1))
    )
    found = ir.Node("", "Gather", [table if looked_up else other, ids])
    scores = ir.Node(
        "", "Gemm", [found.outputs[0], table if multiplied else other], [ir.AttrInt64("transB", 1)], num_outputs=1
    )
    (y,) = scores.outputs
    y.name, y.type, y.shape = "y", ir.TensorType(ir.DataType.FLOAT), ir.Shape(["tokens", ROWS])
    used = [table] * (looked_up or multiplied) + [other] * (not (looked_up and multiplied))
    made = ir.Graph([ids], [y], nodes=[found, scores], initializers=used, opset_imports={"": 18}, name="g")
    return ir.Model(made, ir_version=10)


def written(folder: Path, model: ir.Model) -> onnx.ModelProto:
    ir.save(model, folder / "g.onnx")
    onnx.checker.check_model(str(folder / "g.onnx"), full_check=True)
    return onnx.load(str(folder / "g.onnx"), load_external_data=False)


def test_two_names_refer_to_the_same_bytes_and_mean_the_same(tmp_path: Path) -> None:
    model = graph()
    write_weights(tmp_path / "weights.safetensors", {"table": TABLE}, [model])
    size = (tmp_path / "weights.safetensors").stat().st_size
    separate_lookups(model)
    proto = written(tmp_path, model)
    assert {node.op_type: [*node.input] for node in proto.graph.node}["Gather"] == ["table.rows", "ids"]
    weights = model.graph.initializers
    assert span(weights["table"]) == span(weights["table.rows"])
    assert (tmp_path / "weights.safetensors").stat().st_size == size
    (found,) = ort.InferenceSession(tmp_path / "g.onnx").run(None, {"ids": IDS})
    np.testing.assert_allclose(found, (TABLE[torch.tensor(IDS)] @ TABLE.T).numpy(), rtol=1e-6)


@pytest.mark.parametrize("case", ["looked_up", "multiplied"])
def test_a_table_with_one_kind_of_reader_keeps_its_name(tmp_path: Path, case: str) -> None:
    model = graph(**{case: False})
    write_weights(tmp_path / "weights.safetensors", {"table": TABLE}, [model])
    before = written(tmp_path, model)
    separate_lookups(model)
    assert written(tmp_path, model) == before


def test_a_table_inside_the_graph_is_not_there_twice(tmp_path: Path) -> None:
    model = graph()
    before = written(tmp_path, model)
    separate_lookups(model)
    assert written(tmp_path, model) == before
