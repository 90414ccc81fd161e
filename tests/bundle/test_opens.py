"""Bundles: what opens is what was made, and `load` checks the weights while it builds a session."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import tfexport
from tests.bundle.made import CONFIG, CONTENT, FACTS, GRAPHS, SPEC, fill, graph, make, siblings
from tfexport.bundle.bundle import create_bundle, open_bundle
from tfexport.bundle.manifest import Draft
from tfexport.contract import GraphEntry, encoder_graph
from tfexport.errors import BundleError


def test_a_bundle_opens_as_it_was_made(bundle: Path) -> None:
    opened = open_bundle(bundle)
    assert opened.path == bundle.resolve()
    assert opened.sha256 == hashlib.sha256((bundle / "manifest.json").read_bytes()).hexdigest()
    assert {name: opened.file(name).read_bytes() for name in opened.manifest.files} == CONTENT
    manifest = opened.manifest
    assert (manifest.format_version, manifest.kind) == (1, "encoder-decoder")
    assert (manifest.spec, manifest.config, manifest.graphs) == (SPEC, CONFIG, GRAPHS)
    assert (manifest.versions, manifest.parity) == (FACTS["versions"], FACTS["parity"])
    assert manifest.files["encoder.onnx"].sha256 == hashlib.sha256(CONTENT["encoder.onnx"]).hexdigest()
    assert siblings(bundle) == []


def test_the_same_content_gives_the_same_bytes(tmp_path: Path) -> None:
    first = make(tmp_path / "one")
    second = make(tmp_path / "two", dict(reversed(CONTENT.items())))
    text = first.path.joinpath("manifest.json").read_bytes()
    assert text == second.path.joinpath("manifest.json").read_bytes()
    assert text.endswith(b"}\n")
    assert text == (json.dumps(json.loads(text), indent=2, sort_keys=True) + "\n").encode()


def test_an_encoder_alone_and_a_foreign_module(tmp_path: Path) -> None:
    spec = replace(SPEC, vocab=0, layers=0, heads=0, head_dim=0, value_dim=0, max_target_length=0)
    graphs = {"encoder": GraphEntry.of("encoder.onnx", 18, encoder_graph(spec))}
    with create_bundle(tmp_path / "bundle") as builder:
        fill(builder, {"encoder.onnx": graph(graphs["encoder"])}, spec=spec, config=None, graphs=graphs, parity=None)
    manifest = open_bundle(tmp_path / "bundle").manifest
    assert (manifest.kind, manifest.config, manifest.parity, manifest.graphs) == ("encoder", None, None, graphs)


def test_the_directory_may_be_reached_through_a_link(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "current").symlink_to("bundle")
    assert open_bundle(tmp_path / "current") == open_bundle(bundle)


def test_a_staged_bundle_opens_before_it_is_published(tmp_path: Path) -> None:
    with create_bundle(tmp_path / "bundle") as builder:
        fill(builder, parity=None)
        assert open_bundle(builder.path).manifest.parity is None
        (builder.path / "more.txt").write_text("more")
        builder.finish(Draft(**FACTS))
    assert open_bundle(tmp_path / "bundle").manifest.parity == FACTS["parity"]
    assert "more.txt" in builder.bundle.manifest.files


# ---- what `load` checks while it builds a session


@pytest.mark.parametrize("backend", ["ort", "eager"])
def test_load_names_changed_weights_before_anything_else(backend: str, dates_bundle: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(dates_bundle, tmp_path / "dates")
    weights = copy / "weights.safetensors"
    weights.write_bytes(bytes(weights.stat().st_size))  # no header: neither backend could read it
    with pytest.raises(BundleError, match=r"weights\.safetensors was changed"):
        tfexport.load(copy, backend=backend)
