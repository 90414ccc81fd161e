"""Bundles in int8 and int4 through the library and the command line: what they hold, what runs, what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.numpy import load_file

import tfexport
from tests import tiny
from tests.conftest import DATES
from tfexport.bundle.bundle import open_bundle
from tfexport.cli import main
from tfexport.contract import Quantization
from tfexport.errors import BackendError, BundleError, ConfigError
from tfexport.export import export_bundle
from tfexport.export.config import ExportConfig
from tfexport.nn.config import StackConfig, TransformerConfig
from tfexport.nn.directory import load_model, save_model
from tfexport.nn.transformer import Transformer
from tfexport.verify import VerifyConfig, verify_bundle

Once = Callable[[str, Callable[[Path], object]], Path]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture(scope="session")
def int4(once: Once) -> Path:
    """Export models/dates through the command line, verified; not to be changed."""

    def make(path: Path) -> None:
        result = run("onnx", DATES, "--output", path, "--precision", "int4")
        assert result.exit_code == 0, result.output
        assert result.stdout.startswith(f"{path}: encoder-decoder, int4, 24 recorded texts\nconsistent: ")

    return once("dates-bundle-int4", make)


def test_the_bundle_states_its_quantization(int4: Path) -> None:
    manifest = open_bundle(int4).manifest
    assert manifest.quantization == Quantization(weights="int4", optimize_for="latency")
    assert (manifest.accuracy, manifest.spec.precision) == ("int4", "fp32")
    assert set(manifest.graphs) == {"encoder_contrib", "decoder_contrib"}
    assert set(manifest.files) == {
        "encoder_contrib.onnx",
        "decoder_contrib.onnx",
        "weights.safetensors",
        "tokenizer.json",
        "parity.json",
        "README.md",
    }
    assert sum(entry.bytes for entry in manifest.files.values()) < 0.22 * (DATES / "model.safetensors").stat().st_size
    shown = run("inspect", int4).stdout.splitlines()[0]
    assert re.fullmatch(r"bundle .*: encoder-decoder, int4 for latency, [0-9.]+ kB", shown)
    facts = json.loads(run("inspect", int4, "--json").stdout)
    assert facts["quantization"] == {
        "weights": "int4",
        "optimize_for": "latency",
        "calibration": None,
        "calibration_texts": 0,
    }


def test_the_export_reports_where_outputs_diverge(int4: Path) -> None:
    report = json.loads((int4 / "parity.json").read_text())
    assert report["passed"] is True
    by_method = {check["method"]: check for check in report["decodes"]}
    assert set(by_method) == {"greedy", "beam 4", "batch invariance", "full length", "recorded texts"}
    greedy = by_method["greedy"]
    assert greedy["must_be_exact"] is False
    assert greedy["divergence"]["equal"] == greedy["exact"] / greedy["sequences"] < 1
    assert 0 <= greedy["divergence"]["position"] <= 12
    assert greedy["divergence"]["margin"] > 0
    assert by_method["batch invariance"]["divergence"] is None


def test_it_generates(int4: Path) -> None:
    with tfexport.load(int4, threads=1) as model:
        assert model.session.accuracy == "int4"
        (result,) = model.generate(["Dienstag, 3. März 2026"])
        assert result.text == "2026-03-03"
    assert run("generate", int4, "3 mars 1999", "--num-beams", 2).stdout == "1999-03-03\n"


def test_verify_needs_the_original_model(int4: Path) -> None:
    result = run("verify", int4)
    remedy = "give the model directory that it was made from with --against"
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == f"error: {int4}: holds int4 weights and no model to compare with; {remedy}\n"
    report = verify_bundle(int4, against=DATES, config=VerifyConfig(samples=8))
    assert report.passed
    assert {check.stage for check in report.numbers} == {"eager float64", "eager cached", "ort contrib"}
    assert report.numbers[-1].tolerance == 0.5


def test_a_quantized_bundle_of_another_model_fails(int4: Path, tmp_path: Path) -> None:
    model = load_model(DATES)
    with torch.no_grad():
        model.dec.layers[0].ffn.fc1.weight.mul_(-1)  # type: ignore[union-attr]
    save_model(model, tmp_path / "other")
    result = run("verify", int4, "--against", tmp_path / "other", "--samples", 4)
    assert result.exit_code == 2
    assert "ort contrib differs by" in result.stdout


def test_operations_that_need_wide_weights_are_refused_with_the_remedy(int4: Path) -> None:
    with pytest.raises(BundleError, match="no eager model"):
        tfexport.load(int4, backend="eager")
    with pytest.raises(BackendError, match=r"int4 weights for the CPU; for device cuda export it again with .* fp16"):
        tfexport.load(int4, device="cuda")
    result = run("trt", int4, "--target", "tensorrt-rtx", "--compute-capability", "8.9", "--dry-run")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "int4 weights for ONNX Runtime on the CPU; export it with --precision fp32 and build" in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "int4", "optimize_for": "throughput"}, "ONNX Runtime multiplies 4 bits weight-only; use int8"),
        ({"precision": "fp16", "optimize_for": "throughput"}, "which needs int8, not fp16; omit it"),
        ({"optimize_for": "throughput"}, "which needs int8, not fp32; omit it"),
        ({"optimize_for": "size"}, "optimize_for is 'size', expected 'latency' or 'throughput'"),
        (
            {"precision": "fp6"},
            "precision is 'fp6', expected 'fp32' or 'fp16' or 'bf16' or 'int8' or 'int4' or 'w8a8' or 'fp8'",
        ),
    ],
)
def test_contradictions_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        ExportConfig(**options)
    flags = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
    result = run("onnx", "preset:tiny", "--output", tmp_path / "out", *flags)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    assert not list(tmp_path.iterdir())


# Wide enough to have matrices of 4,096 weights; inputs of 100 fill no block.
STACK = StackConfig(layers=1, num_heads=4, d_ff=100, norm_place="pre", final_norm=True)
HEAD = {"head": "sequence", "labels": tuple(map(str, range(80)))}
ALONE = replace(tiny.ENCODER_ALONE, d_model=64, source_vocab=100, encoder=STACK, **HEAD)
UNEVEN = replace(STACK, d_k=12, d_v=20)
T5 = replace(tiny.VARIANTS["t5"], d_model=64, source_vocab=100, target_vocab=100, encoder=UNEVEN, decoder=UNEVEN)


@pytest.mark.parametrize(("config", "variant"), [(T5, {"decoder_static"}), (ALONE, set())])
def test_models_that_have_no_contrib_variant(config: TransformerConfig, variant: set[str], tmp_path: Path) -> None:
    """Without biases a linear map is a turned matrix; the inputs of some are no multiple of a block."""
    torch.manual_seed(0)
    save_model(Transformer(config), tmp_path / "model")
    bundle = export_bundle(str(tmp_path / "model"), tmp_path / "bundle", ExportConfig(precision="int8"))
    assert set(bundle.manifest.graphs) == {"encoder", *variant}
    assert bundle.manifest.parity is not None
    assert bundle.manifest.parity["passed"] is True
    plain = [
        name
        for name, tensor in load_file(bundle.file("weights.safetensors")).items()
        if tensor.dtype == np.float32 and tensor.ndim == 2 and not name.endswith(".scales") and tensor.size >= 4096
    ]
    assert plain == []
