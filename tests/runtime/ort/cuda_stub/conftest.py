"""ONNX Runtime with CUDA and the stubs that it runs on, made once; skips, saying why, where that is not possible."""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.runtime.ort.cuda_stub.build import build_stubs

# Kept for the next run: the wheel has 250 MB.
WHEELS = ROOT / "build" / "onnxruntime-gpu"
VERSION = "1.31.1"


@dataclass(frozen=True)
class StubGpu:
    """A stub of a GPU."""

    wheel: Path  # folder that onnxruntime-gpu was installed into, apart from onnxruntime
    libraries: Path  # folder of the stub libraries

    def run(self, *arguments: str, libraries: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run Python with onnxruntime-gpu in the place of onnxruntime, on the stubs or on those of another folder."""
        paths = {"PYTHONPATH": str(self.wheel), "LD_LIBRARY_PATH": str(libraries or self.libraries)}
        environment = {**os.environ, **paths, "OMP_NUM_THREADS": "1"}
        return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="session")
def stub_gpu_of(once: Callable[[str, Callable[[Path], object]], Path]) -> Callable[[str], StubGpu]:
    """Return a function that makes the stubs for a version of onnxruntime-gpu."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        pytest.skip("stub CUDA libraries are for Linux x86-64")
    if missing := [tool for tool in ("gcc", "readelf", "nm") if shutil.which(tool) is None]:
        pytest.skip(f"stub CUDA libraries need {', '.join(missing)}")

    def make(version: str) -> StubGpu:
        output = once(f"onnxruntime-gpu-{version}.txt", lambda path: path.write_text(fetch(version))).read_text()
        if output:
            pytest.skip(f"onnxruntime-gpu {version} cannot be had: {output}")
        wheel = WHEELS / folder_of(version)

        def build(folder: Path) -> None:
            folder.mkdir()
            build_stubs(wheel, folder)

        return StubGpu(wheel, once(f"cuda-stub-{version}", build))

    return make


@pytest.fixture(scope="session")
def stub_gpu(stub_gpu_of: Callable[[str], StubGpu]) -> StubGpu:
    return stub_gpu_of(VERSION)


def folder_of(version: str) -> str:
    """Name the folder of a wheel, which is for one version of Python."""
    return f"{version}-{sys.implementation.cache_tag}"


def fetch(version: str) -> str:
    """Install the wheel into a folder apart from onnxruntime, which has the same files; return the problem, or ""."""
    WHEELS.mkdir(parents=True, exist_ok=True)
    folder, part = WHEELS / folder_of(version), WHEELS / f"{folder_of(version)}.part"
    with (WHEELS / f"{folder_of(version)}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # for other runs
        if not folder.exists():
            shutil.rmtree(part, ignore_errors=True)
            pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:")
            what = ("--retries", "1", "--target", str(part), f"onnxruntime-gpu=={version}")
            done = subprocess.run([*pip, *what], capture_output=True, text=True)
            if done.returncode:
                lines = done.stderr.strip().splitlines()
                errors = [line for line in lines if line.startswith("ERROR")]
                return (errors or lines or ["pip failed"])[-1][:200]
            part.rename(folder)
    return ""
