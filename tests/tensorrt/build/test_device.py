"""Engines are built, inspected and timed on the chosen GPU, with TensorRT-RTX and two GPUs that are doubles."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.command import refuses, run
from tests.tensorrt.artifact.stored import L4
from tests.tensorrt.cuda_double import CudaDouble
from tfexport.errors import BackendError, ConfigError
from tfexport.tensorrt import cuda, pipeline
from tfexport.tensorrt._library import Library
from tfexport.tensorrt.config import EngineConfig
from tfexport.tensorrt.cuda import Gpu, choose_gpu
from tfexport.tensorrt.pipeline import build_engines, resolve_build

A10 = Gpu(index=1, name="NVIDIA A10", compute_capability="8.6", memory_bytes=24 << 30, driver_version="13.0")
SMALL = EngineConfig(target="tensorrt-rtx", max_batch=4, max_source_length=16, max_target_length=12)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch, rtx: Library) -> None:
    monkeypatch.setattr(cuda, "_probe", lambda: ([L4, A10], ""))
    monkeypatch.setattr(cuda, "Cuda", CudaDouble)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(("device", "gpu"), [("cuda:1", A10), ("cuda:0", L4), ("cuda", L4), (None, L4)])
def test_everything_happens_on_the_chosen_gpu(
    device: str | None, gpu: Gpu, dates_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[tuple[str, int]] = []

    def watch(name: str, result: Any = None) -> None:
        call = getattr(pipeline, name)

        def watched(*arguments: Any, **options: Any) -> Any:
            used.append((name, CudaDouble.current_number()))
            return call(*arguments, **options) if result is None else result

        monkeypatch.setattr(pipeline, name, watched)

    for name in ("parse_graph", "build_engine"):
        watch(name)
    watch("inspect_plan", '{"Layers": []}')
    bundle = shutil.copytree(dates_bundle, tmp_path / "bundle")
    machine = build_engines(bundle, SMALL, device=device).manifest.machine
    assert (machine.gpu, machine.compute_capability) == (gpu.name, gpu.compute_capability)
    assert used == [(name, gpu.index) for name in ("parse_graph", "build_engine", "inspect_plan")] * 3
    assert CudaDouble.current_number() == 0


@pytest.mark.usefixtures("two_gpus")
def test_a_build_is_for_the_chosen_gpu(dates_bundle: Path) -> None:
    assert resolve_build(dates_bundle, SMALL, "cuda:1").config.compute_capabilities == ("8.6",)
    assert resolve_build(dates_bundle, SMALL).config.compute_capabilities == ("8.9",)


@pytest.mark.usefixtures("two_gpus")
def test_a_gpu_that_cannot_be_chosen_is_refused(dates_bundle: Path) -> None:
    with pytest.raises(BackendError, match="the last GPU is cuda:1"):
        choose_gpu("cuda:2")
    with pytest.raises(ConfigError, match="device is cpu"):
        choose_gpu("cpu")
    refuses(run("trt", dates_bundle, "--device", "cuda:3", "--dry-run"), "device is cuda:3")


def test_a_named_gpu_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_probe", lambda: ([], "no driver"))
    assert choose_gpu(None) is None
    with pytest.raises(BackendError, match="no driver"):
        choose_gpu("cuda")
