"""Texts of a model with states instead of keys and values, on every backend, compared with NumPy."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch

from tests import tiny
from tests.nn.numpy_recurrence import NumpyRecurrence
from tests.runtime.exported import Once, exported
from tests.runtime.test_contract import BACKENDS
from tfexport.contract import DECODER
from tfexport.decode.offline import decode
from tfexport.errors import GraphError
from tfexport.export.write import write_graphs
from tfexport.generation import DecodeConfig
from tfexport.nn.config import model_spec

MODELS = {name: tiny.model(tiny.VARIANTS[name], dtype=torch.float32) for name in ("ssru", "average")}
MODEL = MODELS["ssru"]
SOURCES = [[7, 12, 9, 30, 4], [3], [28, 5, 6, 7, 8, 9, 10, 11], [14, 15]]
LENGTH = 12


@pytest.mark.parametrize("mixer", MODELS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_texts_equal_those_of_numpy(backend: str, mixer: str, once: Once) -> None:
    model = MODELS[mixer]
    session, reference = BACKENDS[backend](model, once), NumpyRecurrence(model)
    greedy = decode(session, SOURCES, DecodeConfig(max_new_tokens=LENGTH))
    assert [list(found.token_ids) for (found,) in greedy] == [reference.greedy(one, LENGTH) for one in SOURCES]
    options = {"num_beams": 3, "num_return_sequences": 3, "length_penalty": 0.0, "early_stopping": True}
    searched = decode(session, SOURCES, DecodeConfig.from_dict({"max_new_tokens": LENGTH, **options}), batch_size=6)
    for source, found in zip(SOURCES, searched, strict=True):
        expected = reference.beams(source, LENGTH, 3)
        assert [list(one.token_ids) for one in found] == [ids for _, ids in expected]
        assert [one.log_prob for one in found] == pytest.approx([total for total, _ in expected], abs=1e-4)


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
