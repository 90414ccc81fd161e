"""The alignment graph: as much of the model as it needs, beside graphs that stay what they were."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests import tiny
from tests.tiny import VARIANT_NAMES, VARIANTS
from tfexport.bundle.bundle import open_bundle
from tfexport.contract import AlignmentHeads, Quantization
from tfexport.describe import describe, inspect_path
from tfexport.export._trace import trace_alignment
from tfexport.export.quantize.integers import write_integer_graphs
from tfexport.nn.config import model_spec
from tfexport.runtime.eager import EagerSession
from tfexport.runtime.ort.backend import OrtSession
from tfexport.runtime.registry import Graphs
from tfexport.runtime.session import Aligns


def test_later_layers_are_left_out() -> None:
    model = tiny.model(tiny.config(encoder={"layers": 1}), dtype=torch.float32)
    heads = AlignmentHeads(layer=0, heads=(3, 1))
    graph = trace_alignment(model, model_spec(model.config, "fp32"), heads, 18).graph
    names = {name.removeprefix("model.") for name in graph.initializers}
    of_decoder = {name for name in names if name.startswith(("dec.layers", "out."))}
    assert {name.split(".")[2] for name in of_decoder} == {"0"}
    assert not {name for name in of_decoder if name.startswith(("dec.layers.0.ffn", "dec.layers.0.cross.v", "out."))}
    assert {"dec.layers.0.cross.q.weight", "dec.layers.0.cross.k.weight"} <= of_decoder


@pytest.mark.parametrize("name", VARIANT_NAMES)
def test_every_variant_equals_eager(name: str, variant: Callable[[str], Path]) -> None:
    model = tiny.model(VARIANTS[name], dtype=torch.float32)
    bundle = open_bundle(variant(name))
    spec, named = bundle.manifest.spec, bundle.manifest.alignment
    assert named is not None
    session = OrtSession(Graphs({path.stem: path for path in bundle.path.glob("*.onnx")}, spec), "concat", threads=1)
    assert isinstance(session, Aligns)
    for source_len, target_len in ((9, 7), (1, 1), (24, 24), (2, 5)):
        source_ids, source_mask, target_ids = (
            array.numpy() for array in tiny.batch(source_len=source_len, target_len=target_len)
        )
        source_mask[:, 0] = True
        expected = EagerSession(model, alignment=named).align(tiny.sources(source_ids, source_mask), target_ids)
        got = session.align(tiny.sources(source_ids, source_mask), target_ids)
        assert got.dtype == np.float32
        assert np.abs(got - expected).max() < 2e-5
        assert (got[np.broadcast_to(~source_mask[:, None], got.shape)] == 0).all()
        assert got.sum(2) == pytest.approx(1, abs=1e-6)
        for row, length in enumerate(source_mask.sum(1)):
            alone = session.align(
                tiny.sources(source_ids[[row], :length], source_mask[[row], :length]), target_ids[[row]]
            )
            assert np.abs(alone[0] - got[row, :, :length]).max() < 1e-6


def test_an_int8_graph_aligns_about_as_that_of_float32(dates_aligned: Path, tmp_path: Path) -> None:
    manifest, quantization = open_bundle(dates_aligned).manifest, Quantization(weights="int8")
    write_integer_graphs(dates_aligned, manifest.graphs, tmp_path, quantization)
    *source, target_ids = (array.numpy() for array in tiny.batch(vocab=12))
    exact, narrow = (
        OrtSession(
            Graphs({name: folder / entry.file for name, entry in manifest.graphs.items()}, manifest.spec, weights),
            "contrib",
            threads=1,
        ).align(tiny.sources(*source), target_ids)
        for folder, weights in ((dates_aligned, None), (tmp_path, "int8"))
    )
    assert 0 < np.abs(exact - narrow).max() < 0.05


def test_the_manifest_and_inspect_show_layer_and_heads(variant: Callable[[str], Path]) -> None:
    assert open_bundle(variant("post")).manifest.alignment == AlignmentHeads(layer=1, heads=(1, 2))
    found = inspect_path(variant("post"))
    assert found["alignment"] == {"layer": 1, "heads": (1, 2)}
    assert "Graph alignment: alignment.onnx, opset 18, attention of layer 1, heads 1, 2" in describe(found)
