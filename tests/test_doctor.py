"""`doctor` in this environment, and in environments broken on purpose."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from tfexport import doctor
from tfexport.doctor import Backend, Diagnosis, diagnose
from tfexport.runtime import probes, registry
from tfexport.runtime.probes import ADD_MODEL

SLOW = "raise ImportError"  # instead of an import that takes seconds


def test_the_probe_model_is_valid_and_adds() -> None:
    onnx.checker.check_model(onnx.load_from_string(ADD_MODEL), full_check=True)
    session = onnxruntime.InferenceSession(ADD_MODEL, providers=["CPUExecutionProvider"])
    x = np.array([3, -0.5], np.float32)
    assert session.run(None, {"x": x})[0].tolist() == [6, -1]


@pytest.fixture(scope="module")
def here() -> Diagnosis:
    """Diagnose this environment, which takes seconds."""
    return diagnose()


def test_both_backends_work_here(here: Diagnosis) -> None:
    assert {(b.name, b.device) for b in here.backends if not b.problem} >= {("eager", "cpu"), ("ort", "cpu")}
    assert here.works
    versions = {library.name: library.version for library in here.libraries}
    assert versions["numpy"] == np.__version__
    assert versions["onnxruntime"] == onnxruntime.__version__
    assert "pytest" not in versions
    assert json.loads(json.dumps(here.to_dict()))["works"] is True


def test_a_missing_library_comes_with_the_line_that_installs_it(here: Diagnosis) -> None:
    assert importlib.util.find_spec("tensorrt") is None
    line = next(line for line in here.lines() if line.startswith("  tensorrt "))
    assert line.split(maxsplit=1)[1] == "not installed    pip install 'tfexport[trt]'"


def in_environment(folder: Path, **modules: str) -> dict[str, Any]:
    """Diagnose in a process that finds `modules`, and all in `folder`, before all others."""
    for name, source in modules.items():
        (folder / f"{name}.py").write_text(source)
    code = "import json; from tfexport.doctor import diagnose; print(json.dumps(diagnose().to_dict()))"
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def whats(found: dict[str, Any]) -> str:
    return "\n".join(f"{problem['what']} → {problem['fix']}" for problem in found["problems"])


def test_two_distributions_of_onnxruntime_are_found(tmp_path: Path) -> None:
    info = tmp_path / "onnxruntime_gpu-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: onnxruntime-gpu\nVersion: 1.0\n")
    (info / "top_level.txt").write_text("onnxruntime\n")
    (info / "RECORD").write_text("onnxruntime/__init__.py,,\n")
    found = in_environment(tmp_path, torch=SLOW)
    assert "onnxruntime and onnxruntime-gpu are installed together" in whats(found)
    assert "pip uninstall -y onnxruntime onnxruntime-gpu && pip install 'tfexport[cpu]'" in whats(found)
    # It is also older than what tfexport asks for.
    assert "onnxruntime-gpu is 1.0, expected 1.30 or newer" in whats(found)


def test_a_module_without_its_native_library_is_found(tmp_path: Path) -> None:
    (tmp_path / "onnxruntime" / "capi").mkdir(parents=True)
    (tmp_path / "onnxruntime" / "__init__.py").touch()
    found = in_environment(tmp_path, torch=SLOW)
    ort = next(backend for backend in found["backends"] if backend["name"] == "ort")
    assert ort["problem"] == "onnxruntime can be imported, but its native library is missing; install it again"
    repair = "pip uninstall -y onnxruntime onnxruntime-gpu && pip install --force-reinstall 'tfexport[cpu]'"
    assert f"→ {repair}" in whats(found)


def test_a_library_that_fails_or_crashes_is_reported(tmp_path: Path) -> None:
    (tmp_path / "tensorrt").mkdir()
    broken = {"onnxruntime": "raise ImportError('libcudart.so.13: cannot open')"}
    found = in_environment(tmp_path, torch="import os; os.kill(os.getpid(), 11)", **broken)
    problems = {backend["library"]: backend["problem"] for backend in found["backends"]}
    assert problems["onnxruntime"] == "ImportError: libcudart.so.13: cannot open"
    assert problems["torch"] == "crashed with signal 11"
    assert "the module tensorrt is incomplete" in problems["tensorrt"]
    assert found["works"] is False
    assert "no backend works" in whats(found)


def test_a_provider_that_falls_back_counts_as_broken(tmp_path: Path) -> None:
    """ONNX Runtime takes the CPU without an error where CUDA does not load."""
    fallback = """
import numpy
set_default_logger_severity = lambda level: None
get_available_providers = lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"]
class InferenceSession:
    def __init__(self, model, providers): pass
    def get_providers(self): return ["CPUExecutionProvider"]
    def run(self, names, feeds): return [feeds["x"] * 2]
"""
    found = in_environment(tmp_path, torch=SLOW, onnxruntime=fallback)
    backends = {(b["name"], b["device"]): b["problem"] for b in found["backends"]}
    assert backends["ort", "cpu"] == ""
    # Without a driver the check before the session fails, with one the check after it.
    assert re.match(
        r"asked for CUDAExecutionProvider, got \['CPUExecutionProvider'\]|ort: no NVIDIA driver|ort: the NVIDIA driver",
        backends["ort", "cuda"],
    )


def test_execution_providers_that_are_not_used_are_named(here: Diagnosis, tmp_path: Path) -> None:
    names = ["CoreMLExecutionProvider", "CPUExecutionProvider", "AzureExecutionProvider"]
    found = in_environment(tmp_path, torch=SLOW, onnxruntime=f"get_available_providers = lambda: {names}")
    assert found["unused_providers"] == ["CoreML"]
    assert any("CoreML" in line for line in dataclasses.replace(here, unused_providers=("CoreML",)).lines())


def test_a_hung_probe_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "_CALL", "import time; time.sleep(60)")
    monkeypatch.setattr(registry, "backends", lambda: (registry.get("ort"),))
    monkeypatch.setattr(doctor, "find_gpus", lambda: ([], "none"))
    monkeypatch.setattr(probes, "TIMEOUT_S", 0.5)
    assert diagnose().backends == (Backend("ort", "cpu", "no answer within 0.5 s", "onnxruntime"),)


def test_tensorrt_works_or_reports_why_not(here: Diagnosis) -> None:
    pytest.importorskip("tensorrt_rtx")
    (trt,) = (backend for backend in here.backends if backend.library == "tensorrt-rtx")
    assert (trt.name, trt.device) == ("trt", "gpu")
    if not here.gpus:
        assert trt.problem.startswith("cuda: no GPU can be used here: ")
        assert not [problem for problem in here.problems if "tensorrt" in problem.what], "no fault of this machine"
        assert "  none" in here.lines()[here.lines().index("GPUs") :][:2]
