"""Manifests: identity and provenance, and manifests of earlier versions."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.bundle.made import edit, fill, refused
from tfexport.bundle.bundle import create_bundle, open_bundle
from tfexport.bundle.manifest import Identity, Manifest, ModuleEntry, Provenance
from tfexport.contract import graph_contract
from tfexport.describe import describe, inspect_path
from tfexport.errors import ConfigError

# Written by tfexport 0.1.0: `tfexport onnx models/dates --name dates --license Apache-2.0 --alignment 1 --loop`.
RECORDED = (Path(__file__).parent / "data" / "manifest.json").read_bytes()
# Keys that early bundles lack.
LATER = ("quantization", "text", "alignment", "checkpoint", "provenance", "module", "identity", "loop")


def recorded() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(RECORDED)
    del data["self_sha256"]
    return data


def test_a_recorded_manifest_is_read_and_written_the_same() -> None:
    manifest = Manifest.from_bytes(RECORDED)
    written = json.loads(manifest.to_bytes())
    expected = {name: value for name, value in recorded().items() if name != "loop"}  # which is no longer used
    del written["self_sha256"], expected["graphs"]["loop"]
    assert written["text"].pop("end") is None  # later versions record it, and what follows
    for part in (written["spec"], written["config"]):
        assert [part.pop(name) for name in ("features", "image", "speech")] == [None, None, None]
        assert [part.pop(name) for name in ("head", "labels", "pooling")] == ["none", [], "mean"]
    scaling = [written["config"].pop(f"rotary_{name}") for name in ("scaling", "factor", "original_length")]
    assert scaling == ["none", 8.0, 8192]
    assert written["spec"].pop("state_width") == 0
    own = ("d_model", "embedding_scale", "embedding_norm", "norm_eps", "activation", "feed_forward")
    for side in ("encoder", "decoder"):
        assert written["config"][side].pop("parallel") == "none"
        assert written["config"][side].pop("mixer") == "attention"
        assert {written["config"][side].pop(name) for name in own} == {None}
    assert written == expected
    assert Manifest.from_dict(json.loads(json.dumps(manifest.to_dict()))) == manifest
    assert manifest.identity.given() == {"name": "dates", "license": "Apache-2.0"}
    assert len(manifest.text.samples) == 24
    for name, graph in manifest.graphs.items():
        assert graph.spec == graph_contract(manifest.spec, name)


def test_a_manifest_of_an_early_version_is_read() -> None:
    data = {name: value for name, value in recorded().items() if name not in LATER}
    old = {"encoder_contrib": "encoder_fused", "decoder_contrib": "decoder_fused"}
    graphs = {name: graph for name, graph in data["graphs"].items() if name not in ("alignment", "loop", "reorder")}
    manifest = Manifest.from_dict(data | {"graphs": {old.get(name, name): graph for name, graph in graphs.items()}})
    assert set(manifest.graphs) == set(graphs)
    assert manifest.checkpoint == {}
    assert manifest.text.samples == ()
    assert manifest.identity.given() == {}


# ---- identity and provenance

NAMED = Identity(name="Dates", version="2.1", license="Apache-2.0", date="2026-01-31")
IMPORTED = Provenance(layout="hf_marian", proven=True, certificate_sha256="0" * 64, layout_sha256="1" * 64)


def test_identity_and_provenance_are_stored_and_shown(tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    with create_bundle(bundle) as builder:
        fill(builder, identity=NAMED, provenance=IMPORTED)
    manifest = open_bundle(bundle).manifest
    assert (manifest.identity, manifest.provenance) == (NAMED, IMPORTED)
    found = inspect_path(bundle)
    assert (found["identity"], found["provenance"]) == (NAMED.to_dict(), IMPORTED.to_dict())
    lines = describe(found)
    assert lines[1] == "  name Dates, version 2.1, license Apache-2.0, date 2026-01-31"
    assert f"  layout hf_marian, certificate sha256 {'0' * 64}" in lines
    edit(bundle, lambda data: data["provenance"].update(proven="yes", layout="a\nb", certificate_sha256="x"))
    refused(bundle, "proven is 'yes', expected true or false")
    edit(bundle, lambda data: data["provenance"].update(proven=True))
    refused(bundle, "layout is 'a\\nb', expected printable text", "certificate_sha256 is 'x', expected 64 hexadecimal")


PASSED = {"passed": True}
MODULE = ModuleEntry(name="mine.Model", weights_sha256="0" * 64)


@pytest.mark.parametrize(
    ("facts", "status"),
    [
        ({"parity": PASSED, "provenance": IMPORTED}, "proven"),
        ({"parity": PASSED, "config": None, "module": MODULE}, "consistent"),
        ({"parity": PASSED, "config": None, "module": MODULE, "provenance": Provenance(proven=True)}, "proven"),
        ({"parity": PASSED}, "consistent"),
        ({"parity": PASSED, "provenance": replace(IMPORTED, proven=False)}, "consistent"),
        ({"parity": None, "provenance": IMPORTED}, "unproven"),
        ({"parity": {"passed": False}, "provenance": IMPORTED}, "unproven"),
        ({"parity": None}, "unproven"),
    ],
)
def test_the_status_follows_from_the_comparisons(facts: dict[str, Any], status: str, tmp_path: Path) -> None:
    """In a manifest without the field, as earlier versions wrote it."""
    with create_bundle(tmp_path / "bundle") as builder:
        fill(builder, **facts)
    found = inspect_path(tmp_path / "bundle")
    assert found["status"] == open_bundle(tmp_path / "bundle").manifest.proof.status == status
    assert f"  {status}: {found['proof']}" in describe(found)


def test_a_status_that_contradicts_the_comparisons_is_refused(tmp_path: Path) -> None:
    with create_bundle(tmp_path / "bundle") as builder:
        fill(builder, parity=PASSED, provenance=Provenance(status="consistent"))
    assert open_bundle(tmp_path / "bundle").manifest.proof.status == "consistent"
    edit(tmp_path / "bundle", lambda data: data["provenance"].update(status="proven"))
    refused(tmp_path / "bundle", "provenance.status is proven, but parity and proven make it consistent")


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"name": ""}, "name is '', expected 1 to 200 characters of one line"),
        ({"name": "a\nb"}, "expected 1 to 200 characters of one line"),
        ({"license": " MIT"}, "license is ' MIT', expected 1 to 200 characters of one line"),
        ({"version": "1" * 201}, "expected 1 to 200 characters of one line"),
        ({"version": 2}, "version is 2, expected a text"),
        ({"date": "2026-02-30"}, "date is '2026-02-30', expected YYYY-MM-DD, such as 2026-01-31"),
        ({"date": "20260131"}, "date is '20260131', expected YYYY-MM-DD"),
    ],
)
def test_an_invalid_identity_is_refused(wrong: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Identity(**wrong)
    assert problem in str(caught.value)
