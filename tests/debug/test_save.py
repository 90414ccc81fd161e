"""`tfexport trt --save-graphs` saves what runs in Polygraphy as it is, and equals a decode of the bundle."""

from __future__ import annotations

import base64
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import tfexport
from tests.command import ran, refuses, run
from tfexport.debug.save import _trtexec
from tfexport.tensorrt.config import ShapeRange

pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed")

RTX = ("--target", "tensorrt-rtx", "--compute-capability", "8.9")
SMALL = ("--max-batch", "4", "--max-source-length", "24", "--max-target-length", "12")
STAGES = ["encoder", "decoder_static.step", "decoder_static.prefill", "reorder"]


@pytest.fixture(scope="module")
def saved(once: Callable[[str, Callable[[Path], object]], Path], dates_fp16: Path) -> Path:
    def make(path: Path) -> None:
        result = ran("trt", dates_fp16, *RTX, *SMALL, "--save-graphs", path)
        path.with_name("stdout").write_text(result.stdout)

    return once("saved-graphs", make)


def script(command: str) -> subprocess.CompletedProcess[str]:
    paths = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": paths, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, shell=True, capture_output=True, text=True, env=environment)


def arrays(path: Path) -> dict[str, NDArray[Any]]:
    """Read Polygraphy's inputs without it."""
    (found,) = json.loads(path.read_text(encoding="utf-8"))
    return {name: np.load(io.BytesIO(base64.b64decode(entry["array"]))) for name, entry in found.items()}


def printed(saved: Path) -> str:
    """Return the first command that was printed."""
    return next(line for line in saved.with_name("stdout").read_text().splitlines() if "onnxruntime.sh" in line).split(
        "  "
    )[1]


@pytest.mark.parametrize("stage", STAGES[:2])
def test_the_commands_run_and_outputs_are_equal(saved: Path, stage: str) -> None:
    command = printed(saved)
    assert saved.with_name("stdout").read_text().rstrip().endswith(", ".join(STAGES[1:]))
    done = script(command.replace(str(saved / "encoder"), str(saved / stage)))
    assert done.returncode == 0, done.stdout
    assert "Pass Rate: 100.00%" in done.stdout


def test_a_changed_output_fails(saved: Path, tmp_path: Path) -> None:
    step = saved / "decoder_static.step"
    changed = json.loads((step / "outputs.json").read_text())
    outputs = changed["lst"][0][1][0]["outputs"]
    outputs["present_key.0"] = outputs["present_value.0"]
    (tmp_path / "outputs.json").write_text(json.dumps(changed))
    done = script(f"sh {step}/onnxruntime.sh --load-outputs {tmp_path}/outputs.json")
    assert done.returncode != 0
    assert "FAILED" in done.stdout


def test_inputs_are_those_of_a_decode(saved: Path, dates_fp16: Path) -> None:
    samples = json.loads((dates_fp16 / "manifest.json").read_text())["text"]["samples"][:4]
    inputs = arrays(saved / "encoder" / "inputs.json")
    for row, mask, sample in zip(inputs["source_ids"], inputs["source_mask"], samples, strict=True):
        assert row[mask].tolist() == sample["source_ids"]
    prefill = arrays(saved / "decoder_static.prefill" / "inputs.json")
    with tfexport.load(dates_fp16) as model:
        generated = model.generate_ids([sample["source_ids"] for sample in samples])
    start = model.spec.tokens.start
    for row, ids in zip(prefill["target_ids"].tolist(), generated, strict=True):
        count = min(len(row) - 1, len(ids[0].token_ids))
        assert row[: count + 1] == [start, *ids[0].token_ids[:count]]
    step = arrays(saved / "decoder_static.step" / "inputs.json")
    assert step["cache_lengths"].tolist() == [7] * 4
    assert (np.abs(step["past_key.0"]).max((0, 1, 3)) > 0).tolist() == [True] * 7 + [False] * 5


def test_the_commands_for_a_gpu_have_the_profiles_of_the_build(saved: Path, dates_fp16: Path) -> None:
    plan = json.loads(ran("trt", dates_fp16, *RTX, *SMALL, "--dry-run", "--json").stdout)
    step, prefill = plan["profiles"]["decoder_static"]
    for stage, profile in (("decoder_static.step", step), ("decoder_static.prefill", prefill)):
        for bound in ("min", "opt", "max"):
            shapes = ",".join(f"{name}:{'x'.join(map(str, shape[bound]))}" for name, shape in profile.items())
            assert f"--{bound}Shapes={shapes} " in (saved / stage / "trtexec.sh").read_text()
    for name in step:
        raw = (saved / "decoder_static.step" / f"{name}.bin").read_bytes()
        assert raw == arrays(saved / "decoder_static.step" / "inputs.json")[name].tobytes()


# Read from samples/common/sampleOptions.cpp of NVIDIA/TensorRT, tags v10.0.1, v10.3.0, v10.8.0, v10.13.3, v10.15,
# v10.16, v11.0 and v11.1. From 11.0 on, the last two print a warning and have no effect.
OPTIONS = {
    *("onnx", "noTF32", "minShapes", "optShapes", "maxShapes", "shapes", "loadInputs"),
    *("profilingVerbosity", "dumpProfile", "dumpOutput"),
}
OF_10 = {"stronglyTyped", "separateProfileRun"}


@pytest.mark.parametrize(("version", "options"), [("10.0.1", OPTIONS | OF_10), ("11.1.0", OPTIONS)])
def test_every_option_of_trtexec_exists_in_its_version(version: str, options: set[str]) -> None:
    shape = ShapeRange((1, 1), (2, 4), (4, 8))
    stage: Any = SimpleNamespace(
        graph=SimpleNamespace(name="encoder"), profile={"source_ids": shape}, inputs={"source_ids": np.ones((2, 3))}
    )
    resolved: Any = SimpleNamespace(library=SimpleNamespace(target="tensorrt", version=version))
    tool, *words = _trtexec(stage, resolved)
    assert tool == "trtexec"
    assert {word.removeprefix("--").partition("=")[0] for word in words} == options
    assert "--shapes=source_ids:2x3" in words


def test_polygraphy_builds_an_engine_from_its_command(saved: Path) -> None:
    """Without a GPU it cannot load the engine."""
    done = script(f"sh {saved}/encoder/polygraphy.sh")
    assert "Finished engine building" in done.stdout
    assert "STRONGLY_TYPED" in done.stdout


def test_bfloat16_has_no_files_for_polygraphy(dates_fp16: Path, tmp_path: Path) -> None:
    result = ran("trt", dates_fp16, *RTX, *SMALL, "--precision", "bf16", "--save-graphs", tmp_path / "g")
    assert "no bfloat16" in result.stderr
    assert sorted(path.name for path in (tmp_path / "g" / "reorder").iterdir()) == [
        "cache.bin",
        "order.bin",
        "trtexec.sh",
    ]
    assert (tmp_path / "g" / "reorder" / "cache.bin").stat().st_size == 4 * 4 * 12 * 32 * 2


def test_texts_of_a_file_and_refusals(dates_fp16: Path, tmp_path: Path) -> None:
    (tmp_path / "texts").write_text("3 March 2026\nle 14 juillet 1989\n")
    arguments = ("trt", dates_fp16, *RTX, *SMALL, "--save-graphs", tmp_path / "g")
    result = json.loads(ran(*arguments, "--input", tmp_path / "texts", "--json").stdout)
    assert result["sources"] == "2 texts"
    assert list(result["stages"]) == STAGES
    refuses(run(*arguments), "exists; choose a new folder")
    (tmp_path / "texts").write_text("x" * 40)
    refuses(run(*arguments[:-1], tmp_path / "h", "--input", tmp_path / "texts"), "text 1 has 40 tokens", "limit")
    assert not (tmp_path / "h").exists()
    refuses(run("trt", dates_fp16, *RTX, "--input", tmp_path / "texts"), "--save-graphs")
