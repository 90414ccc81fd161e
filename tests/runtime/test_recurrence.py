"""Graphs of a model with states instead of keys and values; test_contract.py runs them on every backend."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch

from tests import tiny
from tests.runtime.exported import Once, exported
from tfexport.contract import DECODER
from tfexport.errors import GraphError
from tfexport.export.write import write_graphs
from tfexport.nn.config import model_spec

MODEL = tiny.model(tiny.VARIANTS["ssru"], dtype=torch.float32)


@pytest.mark.parametrize("name", DECODER.values())
def test_a_state_can_be_overwritten_where_it_is_read(name: str, once: Once) -> None:
    """ONNX Runtime reads and writes one buffer: nothing may read a state that is written already."""
    graphs, spec = exported(MODEL, once)
    graph = onnx.load(graphs[name], load_external_data=False).graph
    for past, present in zip(spec.cache.names("past"), spec.cache.names("present"), strict=True):
        (reader,) = (node for node in graph.node if past in node.input and node.op_type != "Shape")
        needed, producers = {present}, {output: node for node in graph.node for output in node.output}
        before: set[str] = set()
        while needed:
            node = producers.get(needed.pop())
            before |= set(node.output if node else ())
            needed |= set(node.input if node else ()) - before
        assert set(reader.output) <= before


def test_a_state_takes_no_tokens_back(tmp_path: Path) -> None:
    spec = model_spec(MODEL.config, "fp32")
    with pytest.raises(GraphError, match="speculation"):
        write_graphs(MODEL, spec, tmp_path, variants=("contrib",), opset=18, speculation=True)
