"""Another precision from a bundle's own weights: the same bytes that an export in that precision has."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from tfexport.bundle.bundle import open_bundle
from tfexport.errors import BundleError, GraphError
from tfexport.export.write import write_precision


def test_the_graphs_are_those_of_an_export(dates_bundle: Path, dates_fp16: Path, tmp_path: Path) -> None:
    written = write_precision(open_bundle(dates_bundle), "fp16", "static", tmp_path)
    expected = open_bundle(dates_fp16).manifest.graphs
    assert written == {name: expected[name] for name in ("encoder", "decoder_static")}
    files = ["decoder_static.onnx", "encoder.onnx", "reorder.onnx", "weights.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == files
    for file in files:
        assert (tmp_path / file).read_bytes() == (dates_fp16 / file).read_bytes(), file


def test_a_bundle_of_graphs_alone_names_the_remedy(dates_bundle: Path, tmp_path: Path) -> None:
    bundle = open_bundle(dates_bundle)
    with pytest.raises(BundleError) as caught:
        write_precision(replace(bundle, manifest=replace(bundle.manifest, config=None)), "fp16", "static", tmp_path)
    assert str(caught.value) == (
        f"{bundle.path}: has graphs in fp32 and no model to cast; "
        "export it again with: tfexport onnx SOURCE --precision fp16"
    )
    assert not list(tmp_path.iterdir())


def test_weights_beyond_the_precision_are_listed(dates_bundle: Path, tmp_path: Path) -> None:
    bundle = replace(open_bundle(dates_bundle), path=tmp_path / "bundle")
    shutil.copytree(dates_bundle, bundle.path)
    weights = load_file(bundle.path / "weights.safetensors")
    weights["enc.layers.0.ffn.fc1.weight"][0, 0] = 7e4
    weights["enc.layers.2.norm1.bias"][3] = -1e5
    save_file(weights, bundle.path / "weights.safetensors")
    (tmp_path / "out").mkdir()
    with pytest.raises(GraphError) as caught:
        write_precision(bundle, "fp16", "concat", tmp_path / "out")
    assert str(caught.value) == (
        f"{bundle.path}: enc.layers.0.ffn.fc1.weight is too large for fp16, use bf16 or fp32; "
        "enc.layers.2.norm1.bias is too large for fp16, use bf16 or fp32"
    )
    assert not list((tmp_path / "out").iterdir())
