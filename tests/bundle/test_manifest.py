"""Manifests: those of earlier versions load as they did, and are written again byte by byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tfexport.bundle.manifest import Manifest
from tfexport.contract import graph_contract

# Written by tfexport 0.1.0: `tfexport onnx models/dates --name dates --license Apache-2.0 --alignment 1 --loop`.
RECORDED = (Path(__file__).parent / "data" / "manifest.json").read_bytes()
# What bundles of the first versions do not have.
LATER = ("quantization", "text", "alignment", "checkpoint", "provenance", "module", "identity", "loop")


def recorded() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(RECORDED)
    del data["self_sha256"]
    return data


def test_a_recorded_manifest_is_read_and_written_the_same() -> None:
    manifest = Manifest.from_bytes(RECORDED)
    written = json.loads(manifest.to_bytes())
    expected = {name: value for name, value in recorded().items() if name != "loop"}  # which nothing runs any more
    del written["self_sha256"], expected["graphs"]["loop"]
    assert written == expected
    assert Manifest.from_dict(json.loads(json.dumps(manifest.to_dict()))) == manifest
    assert manifest.identity.given() == {"name": "dates", "license": "Apache-2.0"}
    assert len(manifest.text.samples) == 24
    for name, graph in manifest.graphs.items():
        assert graph.spec == graph_contract(manifest.spec, name, speculation=False)


def test_a_manifest_of_the_first_versions_is_read() -> None:
    data = {name: value for name, value in recorded().items() if name not in LATER}
    old = {"encoder_contrib": "encoder_fused", "decoder_contrib": "decoder_fused"}
    graphs = {name: graph for name, graph in data["graphs"].items() if name not in ("alignment", "loop", "reorder")}
    manifest = Manifest.from_dict(data | {"graphs": {old.get(name, name): graph for name, graph in graphs.items()}})
    assert set(manifest.graphs) == set(graphs)
    assert manifest.checkpoint == {}
    assert manifest.text.samples == ()
    assert manifest.identity.given() == {}
