"""Bundles and model directories that an earlier revision wrote still load and give the same results.

`tests/data/earlier` was written by revision abe9e4b: a model directory with random weights, the bundles that
`tfexport onnx` made of it in fp32 (with `--alignment -1 --loop`) and int8, an encoder, and what they generated.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tfexport
from tests.command import ran
from tfexport.describe import inspect_path
from tfexport.export import export_bundle
from tfexport.export.config import ExportConfig
from tfexport.tensorrt.config import EngineConfig

EARLIER = Path(__file__).parent / "data" / "earlier"
EXPECTED: dict[str, Any] = json.loads((EARLIER / "expected.json").read_text(encoding="utf-8"))


def generated(bundle: Path) -> dict[str, Any]:
    """Generate as the recorded run did."""
    with tfexport.load(bundle, threads=1) as model:
        greedy, beams = (model.generate_ids(EXPECTED["sources"], num_beams=beams) for beams in (1, 4))
        texts = [result.text for result in model.generate(EXPECTED["texts"])]
    return {
        "greedy": [list(map(int, results[0].token_ids)) for results in greedy],
        "texts": texts,
        "beam4": [list(map(int, results[0].token_ids)) for results in beams],
    }


@pytest.mark.parametrize("name", ["fp32", "int8"])
def test_bundles_generate_the_same(name: str) -> None:
    assert generated(EARLIER / name) == EXPECTED[name]


@pytest.mark.parametrize(("name", "status"), [("fp32", "consistent"), ("int8", "unproven"), ("encoder", "consistent")])
def test_the_status_follows_from_the_fields_of_the_manifest(name: str, status: str) -> None:
    assert inspect_path(EARLIER / name)["status"] == status


def test_an_encoder_gives_the_same_vectors() -> None:
    with tfexport.load(EARLIER / "encoder", threads=1) as model:
        np.testing.assert_allclose(model.embed([*EXPECTED["texts"][:1], "w7"]), EXPECTED["encoder"], atol=2e-4)


def test_a_model_directory_exports_to_a_bundle_that_generates_the_same(tmp_path: Path) -> None:
    export_bundle(str(EARLIER / "model"), tmp_path / "bundle", ExportConfig(variants=("contrib",)), verify=False)
    assert generated(tmp_path / "bundle") == EXPECTED["fp32"]


def test_the_decoder_variant_under_its_former_name() -> None:
    assert ExportConfig(forms=("concat",)) == ExportConfig(variants=("concat",))  # type: ignore[call-arg]
    assert EngineConfig.from_dict({"form": "concat"}).variant == "concat"
    with tfexport.load(EARLIER / "fp32", form="concat", threads=1) as model:
        assert model.session.variant == "concat"  # type: ignore[attr-defined]
    ran("generate", EARLIER / "fp32", "w7", "--form", "concat")
    assert "--form " not in ran("generate", "--help").output
