"""Measure a step of engines with and without CUDA graphs, of ONNX Runtime and of PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from tests.gpu import decodes
from tests.gpu.decodes import given_to_gpu, hypotheses, launches, measure
from tests.gpu.job import Job
from tests.gpu.torch_engine import GpuEngine, TorchEngine, WatchedCuda
from tests.tensorrt.session.trt_double import trt_session
from tfexport.bundle.bundle import open_bundle
from tfexport.contract import Device
from tfexport.precision import FLOAT, ITEM_BYTES, Precision
from tfexport.runtime.cpu import step_weight_bytes
from tfexport.runtime.registry import Graphs, LoadOptions, open_session
from tfexport.tensorrt.config import Target

# Random weights of the paper's base model: its decodes seldom end by themselves.
MEASURED = "paper-base"
PRECISIONS: tuple[Precision, ...] = ("fp16", "fp32")


def latency(job: Job, target: Target) -> None:
    """Compare engines with and without CUDA graphs."""
    bundle = job.bundle(MEASURED)
    for precision in PRECISIONS:
        name = job.engine(bundle, target, "static", precision, max_batch=128)
        if name is None:
            continue
        found = {}
        for graphs in (True, False):
            with job.check(f"{target} {precision}{'' if graphs else ' without CUDA graphs'}") as numbers:
                found[graphs] = _run(bundle, name, precision, graphs, numbers)
        with job.check(f"{precision}: equal tokens with and without CUDA graphs"):
            assert found[True] == found[False]


def _run(
    bundle: Path, name: str, precision: Precision, graphs: bool, numbers: dict[str, Any]
) -> list[list[tuple[int, ...]]]:
    """Decode and measure; without graphs every step is queued anew."""
    from tfexport.tensorrt.session._engine import CudaGraphRunner

    run = CudaGraphRunner.run if graphs else (lambda self, name, queue, can_capture: queue())
    with mock.patch.object(CudaGraphRunner, "run", run):
        session = decodes.open_engine(bundle, name)
        try:
            found = [hypotheses(session, 8, beams) for beams in (1, 4)]
            report(session, weight_bytes(bundle, precision), numbers)
        finally:
            session.close()
    return found


def report(session: Any, read: float, numbers: dict[str, Any]) -> None:
    """Measure time before launches, because a profiler would change it."""
    numbers.update(measure(session, read))
    numbers["launches"] = launches(session, given_to_gpu)


def weight_bytes(bundle: Path, precision: Precision) -> float:
    """Return the bytes of weights that a step reads, of a bundle or of engines in another precision."""
    opened = open_bundle(bundle)
    read = step_weight_bytes(opened)
    assert read is not None
    return read * ITEM_BYTES[FLOAT[precision]] / ITEM_BYTES[FLOAT[opened.manifest.spec.precision]]


def parameter_bytes(model: Any) -> int:
    """Return the bytes of parameters that a step reads: see `tfexport.runtime.cpu`, which reads bundles."""
    unread = ("dec.embed.", "dec.pos", ".cross.k.", ".cross.v.")
    named = model.named_parameters(remove_duplicate=False)
    read = {n: p for n, p in named if n.startswith(("dec.", "out.")) and not any(part in n for part in unread)}
    return sum(parameter.numel() * parameter.element_size() for parameter in read.values())


def double_latency(job: Job, cuda: Callable[[], Any] = WatchedCuda, engine: type[TorchEngine] = GpuEngine) -> None:
    """Measure the session for TensorRT on engines of PyTorch."""
    for precision in PRECISIONS:
        with job.check(f"engine double {precision}") as numbers:
            path = job.bundle(MEASURED, precision)
            graphs = Graphs.of(open_bundle(path))
            limits = {"max_batch": 128, "max_shapes": "num_candidates:16"}
            session = trt_session(graphs.paths, graphs.spec, "static", cuda=cuda(), kind=engine, **limits)
            report(session, weight_bytes(path, precision), numbers)
            session.close()


def ort_latency(job: Job, device: Device = "cuda") -> None:
    for precision in PRECISIONS:
        for variant in ("static", "concat"):
            with job.check(f"ort {device} {variant} {precision}") as numbers:
                path = job.bundle(MEASURED, precision)
                session = open_session(open_bundle(path), LoadOptions(backend="ort", variant=variant, device=device))
                report(session, weight_bytes(path, precision), numbers)
                session.close()


def torch_latency(job: Job, *, compiled: bool, device: str = "cuda") -> None:
    for precision in PRECISIONS:
        with job.check(f"{'torch.compile' if compiled else 'eager'} {precision}") as numbers:
            session = eager_session(precision, device, compiled=compiled)
            report(session, parameter_bytes(session.open_model()), numbers)


eager = functools.partial(torch_latency, compiled=False)
compiled = functools.partial(torch_latency, compiled=True)


def eager_session(precision: Precision, device: str, *, compiled: bool) -> Any:
    import torch

    from tfexport.nn.config import model_spec
    from tfexport.nn.presets import build_preset
    from tfexport.runtime.eager import EagerSession

    model = build_preset(MEASURED).to(device=device, dtype=getattr(torch, FLOAT[precision]))
    if compiled:
        torch.compiler.reset()  # the other precision has reached the limit of compilations
        # Otherwise a probability of dropout is a variable, whose comparison ends the graph in each attention.
        torch._dynamo.config.specialize_float = True
        model.decode_step = torch.compile(model.decode_step, dynamic=True)  # type: ignore[method-assign]
    return EagerSession(model, model_spec(model.config, precision))
