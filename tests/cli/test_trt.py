"""`tfexport trt` through the command line, with TensorRT-RTX for real; it builds without a GPU."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import Result

from tests import tiny
from tests.command import TFEXPORT, ran, refuses, run
from tfexport.bundle.bundle import open_bundle
from tfexport.errors import EngineError
from tfexport.export import export_bundle
from tfexport.export.config import ExportConfig
from tfexport.nn.directory import save_model
from tfexport.tensorrt import store
from tfexport.tensorrt._library import load_library
from tfexport.tensorrt.cuda import find_gpus
from tfexport.tensorrt.store import load_engine, open_engine, validity_problem

trt = pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed")

RTX = ("--target", "tensorrt-rtx", "--compute-capability", "8.9")
SMALL = ("--max-batch", "4", "--max-source-length", "16", "--max-target-length", "12")
Once = Callable[[str, Callable[[Path], object]], Path]


def build(bundle: Path, *options: str) -> Result:
    return ran("trt", bundle, *RTX, *SMALL, *options)


@pytest.fixture(scope="session")
def built(once: Once, dates_bundle: Path) -> Path:
    """Return dates with an fp32 engine; `said` beside it has what was printed. Not to be changed."""

    def make(path: Path) -> None:
        shutil.copytree(dates_bundle, path)
        result = build(path)
        path.with_name("trt-said").write_text(json.dumps([result.stdout, result.stderr]))

    return once("trt-dates", make)


@pytest.fixture
def copy(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "bundle"))


def plan_bytes(bundle: Path, name: str) -> int:
    manifest = open_engine(bundle.resolve(), name).manifest
    return sum(plan.bytes for plan in manifest.plans.values())


def test_a_bundle_gets_an_engine(built: Path) -> None:
    stdout, stderr = json.loads(built.with_name("trt-said").read_text())
    folder = built.resolve() / "engines" / "tensorrt-rtx-static-fp32"
    size = plan_bytes(built, folder.name) / 1e6
    first, header, *rows = stdout.splitlines()
    assert first == f"{folder}: tensorrt-rtx {trt.__version__}, encoder, decoder_static, reorder, {size:.1f} MB"
    assert header.split() == ["plan", "MB", "layers", "kernels", "fused", "attention"]
    assert [row.split()[0] for row in rows] == ["encoder", "decoder_static", "reorder"]
    assert stderr == "building encoder\nbuilding decoder_static\nbuilding reorder\n"
    assert sorted(path.name for path in folder.iterdir()) == [
        "build.log", "decoder_static.plan", "encoder.plan", "engine.json", "reorder.plan",
    ]  # fmt: skip
    engine = open_engine(built.resolve(), folder.name)
    engine.check_plans()
    manifest = engine.manifest
    assert manifest.config.compute_capabilities == ("8.9",)
    assert manifest.limits.to_dict() == {
        "max_batch": 4, "max_source_length": 16, "max_target_length": 12, "max_candidates": 256, "capacities": (12,),
    }  # fmt: skip
    decoder = manifest.plans["decoder_static"]
    layers = open_bundle(built).manifest.spec.layers
    assert decoder.layers["KV_CACHE_UPDATE"] == 2 * layers
    assert decoder.layers["ATTENTION_INPUT"] == 2 * layers
    assert [profile["target_ids"].max for profile in decoder.profiles] == [(4, 1), (4, 12)]
    assert decoder.profiles[0]["past_key.0"].max[2] == 12
    assert not [flag for flag in manifest.flags if flag == "TF32"]
    log = (folder / "build.log").read_text()
    assert "== decoder_static" in log
    if decoder.kernels:  # of a version that names them
        assert all(f"KERNEL {count} {name}\n" in log for name, count in decoder.kernels.items())
        fused = sum(count for name, count in decoder.kernels.items() if "mha" in name)
        assert rows[1].split()[3:] == [str(sum(decoder.kernels.values())), str(fused), "of", str(2 * 2 * layers)]


def test_every_capacity_gets_a_decoder(copy: Path) -> None:
    result = build(copy, "--capacities", "4,6", "--force")
    assert result.stderr.splitlines()[1:-1] == [
        f"building {plan}" for plan in ("decoder_static_4", "decoder_static_6", "decoder_static")
    ]
    engine = open_engine(copy.resolve(), "tensorrt-rtx-static-fp32")
    engine.check_plans()
    assert engine.manifest.config.capacities == engine.manifest.limits.capacities == (4, 6, 12)
    for plan, capacity in (("decoder_static_4", 4), ("decoder_static_6", 6), ("decoder_static", 12)):
        made = engine.manifest.plans[plan]
        assert made.layers == engine.manifest.plans["decoder_static"].layers
        assert made.aliases["present_key.0"] == "past_key.0"
        assert [profile["past_key.0"].max[2] for profile in made.profiles] == [capacity] * 2
        assert [profile["target_ids"].max for profile in made.profiles] == [(4, 1), (4, capacity)]


def memory(bundle: Path, *options: str) -> dict[str, int]:
    """Return the estimate of the memory that an engine needs."""
    found = json.loads(run("trt", bundle, *RTX, *SMALL, *options, "--dry-run", "--json").stdout)
    return dict(found["memory"])


def test_the_estimate_includes_every_decoder(dates_bundle: Path) -> None:
    none, one, two = (memory(dates_bundle, *c)["weights"] for c in ((), ("--capacities", "4"), ("--capacities", "4,6")))
    assert one - none > 0.3 * none
    assert two - none == 2 * (one - none)


def test_the_estimate_includes_prefill_and_step(dates_bundle: Path) -> None:
    whole = memory(dates_bundle, "--maxShapes", "source_ids:4x1")
    short = memory(dates_bundle, "--optShapes", "target_ids:4x1", "--maxShapes", "source_ids:4x1,target_ids:4x2")
    assert whole["activations"] == short["activations"]
    assert whole["prefill"] > 2 * whole["activations"]
    assert whole["prefill"] > 3 * short["prefill"]


def test_the_bundle_still_gives_the_same_output(built: Path, dates_bundle: Path) -> None:
    assert open_bundle(built).sha256 == open_bundle(dates_bundle).sha256
    assert run("generate", built, "3 March 2026").stdout == "2026-03-03\n"


@pytest.mark.parametrize("options", [(), ("--force",)])
def test_an_engine_is_replaced_only_with_force(copy: Path, options: tuple[str, ...]) -> None:
    before = (copy / "engines" / "tensorrt-rtx-static-fp32" / "engine.json").read_bytes()
    (copy / "engines" / "tensorrt-rtx-static-fp32" / "engine.json.sig").write_bytes(bytes(64))
    result = run("trt", copy, *RTX, *SMALL, "--max-batch", "2", *options)
    after = (copy / "engines" / "tensorrt-rtx-static-fp32" / "engine.json").read_bytes()
    assert result.exit_code == (0 if options else 1)
    assert (after == before) is not bool(options)
    assert ("the engine was signed and this engine will not be" in result.stderr) is bool(options)
    if not options:
        assert result.stderr.count("\n") == 1
        assert result.stderr.endswith("exists; replace it with --force\n")


def test_the_concat_variant_and_fp16_from_the_weights_of_an_fp32_bundle(copy: Path) -> None:
    build(copy, "--variant", "concat", "--precision", "fp16")
    manifest = open_engine(copy.resolve(), "tensorrt-rtx-concat-fp16").manifest
    decoder = manifest.plans["decoder"]
    assert {t.dtype for t in decoder.inputs if t.name.startswith("past_")} == {"float16"}
    assert (decoder.aliases, decoder.profiles[1]["past_key.0"].min[2]) == ({}, 0)
    assert "KV_CACHE_UPDATE" not in decoder.layers
    assert manifest.versions["torch"]
    assert not list(copy.glob("engines/*/*.onnx"))


def test_int8_weights_make_smaller_plans(copy: Path) -> None:
    assert "weights int8 make the plans smaller" in build(copy, "--weights", "int8").stderr
    manifest = open_engine(copy.resolve(), "tensorrt-rtx-static-fp32-int8").manifest
    whole = open_engine(copy.resolve(), "tensorrt-rtx-static-fp32").manifest
    assert manifest.config.weights == "int8"
    assert manifest.plans["encoder"].layers["DEQUANTIZE"] > 0
    for plan in ("encoder", "decoder_static"):
        assert manifest.plans[plan].bytes < whole.plans[plan].bytes


def test_an_encoder_only_bundle_gets_one_plan(tmp_path: Path) -> None:
    config = replace(tiny.config(encoder={"layers": 1}), decoder=None, target_vocab=None, max_target_length=None)
    save_model(tiny.model(config), tmp_path / "model")
    export_bundle(str(tmp_path / "model"), tmp_path / "bundle", ExportConfig(), verify=False)
    result = run("trt", tmp_path / "bundle", *RTX, "--max-batch", "2", "--json")
    manifest = json.loads(result.stdout)["manifest"]
    assert list(manifest["plans"]) == ["encoder"]
    assert [tensor["name"] for tensor in manifest["plans"]["encoder"]["outputs"]] == ["hidden_states"]
    assert (manifest["config"]["variant"], manifest["limits"]["max_target_length"]) == (None, 0)


def test_a_dry_run_builds_and_writes_nothing(dates_bundle: Path) -> None:
    before = sorted(path.name for path in dates_bundle.iterdir())
    found = json.loads(run("trt", dates_bundle, *RTX, *SMALL, "--precision", "fp16", "--dry-run", "--json").stdout)
    assert sorted(path.name for path in dates_bundle.iterdir()) == before
    assert found["name"] == "tensorrt-rtx-static-fp16"
    assert found["config"]["compute_capabilities"] == ["8.9"]
    assert found["profiles"]["decoder_static"][0]["target_ids"]["max"] == [4, 1]
    spec = open_bundle(dates_bundle).manifest.spec
    token = spec.layers * spec.heads * (spec.head_dim + spec.value_dim) * 2
    assert 4 * token * (2 * 12 + 16) <= found["memory"]["caches"] <= 4 * token * (2 * 12 + 16) * 1.5
    weights = (dates_bundle / "weights.safetensors").stat().st_size
    assert 0.3 * weights < found["memory"]["weights"] < 0.6 * weights
    assert min(found["memory"]["activations"], found["memory"]["prefill"]) > 0
    text = run("trt", dates_bundle, *RTX, *SMALL, "--dry-run").stdout
    assert text.startswith(f"would build tensorrt-rtx-static-fp32 with tensorrt-rtx {trt.__version__}: static, fp32\n")
    assert "Plan decoder_static, prefill" in text
    assert "noTF32" in text


def test_a_refused_build_lists_every_problem_and_writes_nothing(dates_bundle: Path) -> None:
    options = ("--max-source-length", "9999", "--version-compatible", "--compute-capability", "5.0")
    result = run("trt", dates_bundle, "--target", "tensorrt-rtx", *options)
    refuses(result, "max_source_length is 9999", "--version-compatible", "compute capability 5.0")
    assert not (dates_bundle / "engines").exists()


def test_inspect_lists_engines(built: Path) -> None:
    (engine,) = json.loads(run("inspect", built, "--json").stdout)["engines"].items()
    name, facts = engine
    assert (name, facts["target"], facts["version"]) == ("tensorrt-rtx-static-fp32", "tensorrt-rtx", trt.__version__)
    assert (facts["precision"], facts["limits"]["max_batch"]) == ("fp32", 4)
    text = run("inspect", built).stdout
    assert f"Engine {name}\n  tensorrt-rtx {trt.__version__} for 8.9: static, fp32, " in text
    if not find_gpus():
        assert "cannot be used here: GPU: built with 8.9, here is none that can be used" in text


def test_inspect_reports_damage_and_shows_the_rest(copy: Path) -> None:
    (copy / "engines" / "tensorrt-rtx-static-fp32" / "encoder.plan").write_bytes(b"cut off")
    result = ran("inspect", copy)
    assert "encoder.plan has 7 bytes, expected " in result.stdout
    assert "Graph encoder: encoder.onnx" in result.stdout
    (copy / "engines" / "notes").write_text("x")
    assert json.loads(run("inspect", copy, "--json").stdout)["engines"]["notes"]["problem"].endswith("remove it")


def test_an_interrupt_leaves_nothing(copy: Path) -> None:
    shutil.rmtree(copy / "engines")
    command = [TFEXPORT, "trt", str(copy), *RTX]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1)
    assert process.stderr is not None
    assert process.stderr.readline() == "building encoder\n"
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout) == (130, "")
    assert stderr.splitlines()[-1] == f"interrupted; {copy}/engines is not written"
    assert not (copy / "engines").exists()


def test_without_a_gpu_an_engine_is_not_loaded(built: Path) -> None:
    if find_gpus():
        pytest.skip("there is a GPU")
    with pytest.raises(EngineError, match=r"engine tensorrt-rtx-static-fp32: GPU: built with 8\.9, here is none"):
        load_engine(open_bundle(built), "tensorrt-rtx-static-fp32")


def test_the_reasons_of_an_invalid_engine_are_named() -> None:
    valid, suboptimal, invalid = (getattr(trt.EngineValidity, name) for name in ("VALID", "SUBOPTIMAL", "INVALID"))
    bits = trt.EngineInvalidityDiagnostics
    assert validity_problem(trt, valid, 0) is None
    assert validity_problem(trt, suboptimal, int(bits.UNSUPPORTED_CC)) is None
    both = int(bits.VERSION_MISMATCH) | int(bits.UNSUPPORTED_CC)
    assert set(str(validity_problem(trt, invalid, both)).split(", ")) == {
        "invalid", "VERSION_MISMATCH", "UNSUPPORTED_CC",
    }  # fmt: skip
    assert validity_problem(trt, invalid, 0) == "invalid, without a reason"


@pytest.mark.parametrize(("capability", "remedy"), [("9.0", "--target tensorrt "), ("8.9", "build it again with: ")])
def test_an_engine_that_the_library_refuses_has_a_remedy(built: Path, capability: str, remedy: str) -> None:
    bits = trt.EngineInvalidityDiagnostics
    refusal = (trt.EngineValidity.INVALID, int(bits.UNSUPPORTED_CC))
    runtime = SimpleNamespace(get_engine_validity=lambda plan: refusal)
    library = load_library("tensorrt-rtx")
    stored = open_engine(built, "tensorrt-rtx-static-fp32")
    config = replace(stored.manifest.config, compute_capabilities=(capability,))
    engine = replace(stored, manifest=replace(stored.manifest, config=config))
    with pytest.raises(EngineError, match="UNSUPPORTED_CC") as caught:
        store._deserialize(runtime, library, library.listen(), engine, "encoder", "tfexport trt")
    assert remedy in str(caught.value)


@pytest.mark.gpu
def test_an_engine_for_this_gpu_is_loaded(copy: Path) -> None:
    if not find_gpus():
        pytest.skip("the driver finds no GPU")
    result = ran("trt", copy, *SMALL, "--force")
    engine: Any = load_engine(open_bundle(copy), json.loads(result.stdout)["name"])
    assert set(engine.plans) == {"encoder", "decoder_static", "reorder"}
