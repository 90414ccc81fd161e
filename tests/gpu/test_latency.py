"""Milliseconds, reported and not judged: engines with CUDA graphs and without, ONNX Runtime, PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.gpu import decodes
from tests.gpu.decodes import hypotheses, measure
from tests.gpu.job import Job
from tfexport.bundle.bundle import open_bundle
from tfexport.runtime.registry import OpenOptions, open_session
from tfexport.spec import FLOAT, Device, Precision
from tfexport.trt.config import Target

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]
TARGETS: tuple[Target, ...] = ("tensorrt", "tensorrt-rtx")

# Random weights of the paper's base model: its decodes seldom end by themselves.
MEASURED = "paper-base"
PRECISIONS: tuple[Precision, ...] = ("fp16", "fp32")


def latency(job: Job, target: Target) -> None:
    """EngineSet with CUDA graphs and without: the same tokens, and how long they take."""
    bundle = job.bundle(MEASURED)
    for precision in PRECISIONS:
        name = job.engine(bundle, target, "static", precision, max_batch=128)
        if name is None:
            continue
        found = {}
        for graphs in (True, False):
            with job.check(f"{target} {precision}{'' if graphs else ' without CUDA graphs'}") as numbers:
                found[graphs] = _run(bundle, name, graphs, numbers)
        with job.check(f"{precision}: equal tokens with and without CUDA graphs"):
            assert found[True] == found[False]


def _run(bundle: Path, name: str, graphs: bool, numbers: dict[str, Any]) -> list[list[tuple[int, ...]]]:
    """Decode and measure; without graphs every step is queued anew."""
    from tfexport.runtime.trt.graphs import CudaGraphRunner

    run = CudaGraphRunner.run if graphs else (lambda self, name, queue, can_capture: queue())
    with mock.patch.object(CudaGraphRunner, "run", run):
        session = decodes.open_engine(bundle, name)
        try:
            found = [hypotheses(session, 8, beams) for beams in (1, 4)]
            numbers["latency_ms"] = measure(session)
        finally:
            session.close()
    return found


def ort_latency(job: Job, device: Device = "cuda") -> None:
    """ONNX Runtime, both forms."""
    for precision in PRECISIONS:
        for form in ("static", "concat"):
            with job.check(f"ort {device} {form} {precision}") as numbers:
                bundle = open_bundle(job.bundle(MEASURED, precision))
                session = open_session(bundle, "ort", OpenOptions(form=form, device=device))
                numbers["latency_ms"] = measure(session)
                session.close()


def eager_latency(job: Job) -> None:
    """PyTorch as it is."""
    for precision in PRECISIONS:
        with job.check(f"eager {precision}") as numbers:
            numbers["latency_ms"] = measure(eager_session(precision, "cuda", compiled=False))


def compile_latency(job: Job) -> None:
    """PyTorch with the decoder's step compiled."""
    with job.check("torch.compile fp16") as numbers:
        numbers["latency_ms"] = measure(eager_session("fp16", "cuda", compiled=True))


def eager_session(precision: Precision, device: str, *, compiled: bool) -> Any:
    """Open the eager model on a device, in a precision, its step compiled or not."""
    import torch

    from tfexport.models.presets import build_preset
    from tfexport.runtime.eager import EagerSession

    model = build_preset(MEASURED).to(device=device, dtype=getattr(torch, FLOAT[precision]))
    if compiled:
        model.decode_step = torch.compile(model.decode_step, dynamic=True)  # type: ignore[method-assign]
    return EagerSession(model)


@pytest.mark.parametrize("target", TARGETS)
def test_latency(gpu_job: Job, target: Target) -> None:
    latency(gpu_job, target)


def test_ort_latency(gpu_job: Job) -> None:
    ort_latency(gpu_job)


def test_eager_latency(gpu_job: Job) -> None:
    eager_latency(gpu_job)


def test_compile_latency(gpu_job: Job) -> None:
    compile_latency(gpu_job)
