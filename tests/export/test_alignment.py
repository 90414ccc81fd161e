"""The alignment graph: as much of the model as it needs, beside graphs that stay what they were."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from tests import tiny
from tests.conftest import DATES
from tests.tiny import VARIANT_NAMES, VARIANTS
from tfexport.bundle.bundle import open_bundle
from tfexport.contract import AlignmentHeads, Form
from tfexport.describe import describe, inspect_path
from tfexport.export import export_bundle
from tfexport.export.config import ExportConfig
from tfexport.nn.directory import save_model
from tfexport.runtime.eager import EagerSession
from tfexport.runtime.ort.backend import OrtSession
from tfexport.runtime.registry import Graphs
from tfexport.runtime.session import Aligns


@pytest.fixture(scope="session")
def middle(once: Callable[[str, Callable[[Path], object]], Path]) -> Path:
    """Export a model of three layers with the second one's attention as alignment, verified; not to be changed."""
    config = ExportConfig(forms=("concat",), alignment=AlignmentHeads(layer=-2, heads=(3, 1)))

    def make(path: Path) -> None:
        directory = path.with_name(f"{path.name}-model")
        save_model(tiny.model(VARIANTS["mixed"], dtype=torch.float32), directory)
        export_bundle(str(directory), path, config)

    return once("aligned-in-the-middle", make)


def test_what_lies_behind_the_layer_is_left_out(middle: Path) -> None:
    graph = onnx.load(middle / "alignment.onnx", load_external_data=False).graph
    names = {weight.name.removeprefix("model.") for weight in graph.initializer}
    of_decoder = {name for name in names if name.startswith(("dec.layers", "out."))}
    assert {name.split(".")[2] for name in of_decoder} == {"0", "1"}
    assert not {name for name in of_decoder if name.startswith(("dec.layers.1.ffn", "dec.layers.1.cross.v", "out."))}
    assert {"dec.layers.1.cross.q.weight", "dec.layers.1.cross.k.weight"} <= of_decoder


@pytest.mark.parametrize("name", VARIANT_NAMES)
def test_every_variant_says_what_eager_says(name: str, variant: Callable[[str], Path]) -> None:
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
        expected = EagerSession(model, alignment=named).align(source_ids, source_mask, target_ids)
        got = session.align(source_ids, source_mask, target_ids)
        assert got.dtype == np.float32
        assert np.abs(got - expected).max() < 2e-5
        assert (got[np.broadcast_to(~source_mask[:, None], got.shape)] == 0).all()
        assert got.sum(2) == pytest.approx(1, abs=1e-6)
        for row, length in enumerate(source_mask.sum(1)):
            alone = session.align(source_ids[[row], :length], source_mask[[row], :length], target_ids[[row]])
            assert np.abs(alone[0] - got[row, :, :length]).max() < 1e-6


@pytest.mark.parametrize(
    ("precision", "form"), [pytest.param("fp16", "concat", marks=pytest.mark.slow), ("int8", "contrib")]
)
def test_narrow_bundles_align_about_as_eager_does(
    precision: str, form: Form, dates_aligned: Path, tmp_path: Path
) -> None:
    config = ExportConfig(precision=precision, forms=(form,), alignment=AlignmentHeads(layer=-1))
    bundle = export_bundle(str(DATES), tmp_path / "narrow", config, verify=False)
    assert bundle.manifest.alignment == AlignmentHeads(layer=1, heads=(0, 1, 2, 3))
    import tfexport

    pair = (["Dienstag, 3. März 2026"], ["2026-03-03"])
    with tfexport.load(dates_aligned) as exact, tfexport.load(bundle.path) as narrow:
        (expected,), (got,) = exact.align(*pair), narrow.align(*pair)
    assert np.abs(expected.weights - got.weights).max() < 0.05


def test_the_manifest_and_inspect_say_layer_and_heads(middle: Path) -> None:
    manifest = open_bundle(middle).manifest
    assert manifest.alignment == AlignmentHeads(layer=1, heads=(3, 1))
    assert manifest.parity is not None
    assert manifest.parity["passed"] is True
    found = inspect_path(middle)
    assert found["alignment"] == {"layer": 1, "heads": (3, 1)}
    lines = describe(found)
    assert "Graph alignment: alignment.onnx, opset 18, attention of layer 1, heads 3, 1" in lines
