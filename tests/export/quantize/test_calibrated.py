"""Calibrated int8 and float8: ranges of a real decode, graphs with Q/DQ, accuracy, engines, and what is refused."""

from __future__ import annotations

import json
import subprocess
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

import tfexport
from tests.command import ran, refuses, run
from tests.conftest import DATES
from tests.export.test_capacity import build_plan
from tests.tensorrt.engine_graphs import kernels
from tfexport.bundle.bundle import open_bundle
from tfexport.contract import QUANTIZED_WEIGHTS, Quantization
from tfexport.errors import BundleError, ConfigError
from tfexport.export import export_bundle
from tfexport.export.config import ExportConfig
from tfexport.nn.directory import load_model
from tfexport.runtime.ort.calibration import Ranges
from tfexport.tensorrt.config import EngineConfig
from tfexport.tensorrt.pipeline import resolve_build

Once = Callable[[str, Callable[[Path], object]], Path]
MINMAX = ("--calibration-method", "minmax")


@pytest.fixture(scope="session")
def w8a8(once: Once) -> Path:
    """Export models/dates through the command line, verified; not to be changed."""
    return once("dates-w8a8", lambda path: ran("onnx", DATES, "--output", path, "--precision", "w8a8", *MINMAX))


@pytest.fixture(scope="session")
def fp8(once: Once) -> Path:
    config = ExportConfig(precision="fp8", calibration_method="minmax", variants=("static",))
    texts = ["3 mars 1999", "Tue, 7/30/1957"]
    return once("dates-fp8", lambda path: export_bundle(str(DATES), path, config, calibration_texts=texts))


def rounded_inputs(path: Path) -> dict[str, Any]:
    """Return the scale of the activation of every product of narrow numbers, by the name of its matrix."""
    graph = onnx.load(str(path), load_external_data=False).graph
    makers = {name: node for node in graph.node for name in node.output}
    constants = {tensor.name: tensor for tensor in graph.initializer}
    scales = {}
    for node in graph.node:
        weight = makers.get(node.input[1]) if node.op_type in ("MatMul", "Gemm") else None
        if weight is not None and weight.op_type == "DequantizeLinear":
            activation = makers[node.input[0]]
            assert activation.op_type == "DequantizeLinear"
            quantize = makers[activation.input[0]]
            assert quantize.op_type == "QuantizeLinear"
            assert quantize.input[1] == activation.input[1], "one scale rounds and restores"
            assert constants[weight.input[0]].data_type == constants[quantize.input[2]].data_type
            scale = numpy_helper.to_array(constants[quantize.input[1]])
            assert (scale.shape, scale.dtype) == ((), np.float16)
            scales[node.input[1].removeprefix("model.")] = float(scale)
    return scales


def test_the_bundle_states_its_calibration(w8a8: Path) -> None:
    manifest = open_bundle(w8a8).manifest
    assert manifest.quantization == Quantization(weights="int8", calibration="minmax", calibration_texts=24)
    assert (manifest.accuracy, manifest.spec.precision) == ("w8a8", "fp16")
    assert set(manifest.graphs) == {"encoder", "decoder", "decoder_static", "reorder"}
    assert QUANTIZED_WEIGHTS in manifest.files
    assert manifest.parity is not None
    assert manifest.parity["passed"] is True
    assert "int8 and activations by minmax" in ran("inspect", w8a8).stdout.splitlines()[0]


def test_ranges_are_those_of_the_model_on_the_recorded_texts(w8a8: Path) -> None:
    """Independently: PyTorch reads each recorded target at once, and hooks see the inputs of all linear layers."""
    model, largest = load_model(DATES), defaultdict[str, float](float)

    def see(name: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
        def hook(_module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            largest[f"{name}.weight"] = max(largest[f"{name}.weight"], float(inputs[0].abs().max()))

        return hook

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(see(name))
    tokens = open_bundle(w8a8).manifest.spec.tokens
    with torch.no_grad():
        for sample in open_bundle(w8a8).manifest.text.samples:
            source = torch.tensor([sample.source_ids])
            ended = sample.target_ids if sample.target_ids[-1] == tokens.eos else (*sample.target_ids, tokens.eos)
            model(source, torch.ones_like(source, dtype=torch.bool), torch.tensor([[tokens.start, *ended[:-1]]]))
    concat, static = rounded_inputs(w8a8 / "decoder.onnx"), rounded_inputs(w8a8 / "decoder_static.onnx")
    assert concat == static
    found = rounded_inputs(w8a8 / "encoder.onnx") | concat
    assert set(found) == set(largest) - {"out.weight"}
    for name, scale in found.items():
        assert scale * 127 == pytest.approx(largest[name], rel=5e-3), name


@pytest.mark.parametrize("name", ["w8a8", pytest.param("fp8", marks=pytest.mark.slow)])
def test_held_out_dates_are_read(name: str, request: pytest.FixtureRequest) -> None:
    rows = [line.split("\t")[:2] for line in (DATES / "heldout.tsv").read_text(encoding="utf-8").splitlines()[:128]]
    with tfexport.load(request.getfixturevalue(name)) as model:  # chooses threads by the sizes of the weights
        assert model.session.accuracy == name
        results = model.generate([text for text, _ in rows], batch_size=64)
    assert [result.text for result in results] == [date for _, date in rows]


def test_float8_is_calibrated_on_given_texts(fp8: Path) -> None:
    assert open_bundle(fp8).manifest.quantization == Quantization(
        weights="fp8", calibration="minmax", calibration_texts=2
    )
    assert len(rounded_inputs(fp8 / "decoder_static.onnx")) == 16


def test_methods_cut_off_outliers() -> None:
    numbers = np.random.default_rng(0).standard_normal(200_000).astype(np.float32)
    outlier = np.array([15.0], np.float32)
    found = {}
    for method in ("minmax", "percentile", "entropy"):
        ranges = Ranges(method)
        ranges.collect({"x": numbers})
        ranges.collect({"x": outlier})
        found[method] = ranges.compute()["x"]
    assert found["minmax"] == 15
    assert found["percentile"] == pytest.approx(np.percentile(np.abs(numbers), 99.99), rel=0.05)
    assert 2 < found["entropy"] < 8


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("preset:tiny", {"precision": "w8a8"}, "w8a8 is calibrated on texts, and this model has no tokenizer"),
        (DATES, {"precision": "w8a8", "optimize_for": "throughput"}, "needs int8, not w8a8; omit it"),
        (DATES, {"precision": "fp16", "calibration_method": "entropy"}, "needs w8a8 or fp8, not fp16; omit it"),
        (DATES, {"precision": "fp16", "calibration_data": DATES / "heldout.tsv"}, "are for w8a8 and fp8; leave"),
        (DATES, {"precision": "fp8", "variants": "contrib"}, "the contrib variant does not support this model"),
    ],
)
def test_what_does_not_apply_is_refused(
    source: object, options: dict[str, object], message: str, tmp_path: Path
) -> None:
    flags = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
    refuses(run("onnx", source, "--output", tmp_path / "out", *flags), message)
    assert not list(tmp_path.iterdir())


def test_a_model_without_recorded_texts_needs_some(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_bytes((DATES / name).read_bytes())
    with pytest.raises(ConfigError, match="--calibration-data"):
        export_bundle(str(tmp_path), tmp_path / "out", ExportConfig(precision="w8a8"))


def test_there_is_no_eager_model(w8a8: Path) -> None:
    with pytest.raises(BundleError):
        tfexport.load(w8a8, backend="eager")


@pytest.mark.parametrize(
    ("name", "flags", "message"),
    [
        ("w8a8", ("--weights", "int8"), "the bundle is quantized to w8a8; leave it out"),
        ("w8a8", ("--precision", "bf16"), "no model to export again"),
        ("fp8", ("--compute-capability", "8.6"), "need compute capability 8.9 or newer"),
    ],
)
def test_engines_keep_the_precision_of_the_bundle(
    name: str, flags: tuple[str, ...], message: str, request: pytest.FixtureRequest
) -> None:
    pytest.importorskip("tensorrt_rtx")
    refuses(run("trt", request.getfixturevalue(name), "--target", "tensorrt-rtx", "--dry-run", *flags), message)


def test_tensorrt_rounds_activations_in_the_kernels_around_products(w8a8: Path, fp8: Path, dates_fp16: Path) -> None:
    """A kernel scales and rounds what a product reads, such as the result of ReLU."""
    pytest.importorskip("tensorrt_rtx")
    spec = open_bundle(w8a8).manifest.spec
    plans = {folder: kernels(build_plan(folder, "decoder_static", spec)) for folder in (dates_fp16, w8a8, fp8)}
    assert not any("ReluMul" in name for name in plans[dates_fp16])
    assert any(name.endswith("ReluMulMinMaxRounCast") for name in plans[w8a8])
    assert any(name.endswith("ReluMulCast") for name in plans[fp8])


def test_an_engine_depends_on_the_narrow_weights(w8a8: Path) -> None:
    pytest.importorskip("tensorrt_rtx")
    resolved = resolve_build(w8a8, EngineConfig(target="tensorrt-rtx", compute_capabilities=("8.9",)))
    assert QUANTIZED_WEIGHTS in resolved.sources
    assert (resolved.accuracy, resolved.name) == ("w8a8", "tensorrt-rtx-static-w8a8")


def test_a_saved_graph_has_no_command_that_would_differ(w8a8: Path, tmp_path: Path) -> None:
    """Polygraphy cannot set the session option that keeps ONNX Runtime from changing the graph."""
    pytest.importorskip("tensorrt_rtx")
    options = ("--target", "tensorrt-rtx", "--compute-capability", "8.9", "--max-batch", "4", "--json")
    saved = json.loads(ran("trt", w8a8, *options, "--save-graphs", tmp_path / "graphs").stdout)
    assert {*map(tuple, saved["commands"].values())} == {("polygraphy.sh", "trtexec.sh")}
    done = subprocess.run(["sh", tmp_path / "graphs" / "encoder" / "onnxruntime.sh"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert "session.disable_quant_qdq" in done.stderr
