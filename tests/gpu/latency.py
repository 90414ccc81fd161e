"""Measure a step of engines with and without CUDA graphs, of ONNX Runtime and of PyTorch."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from tests.gpu import decodes
from tests.gpu.decodes import Setting, given_to_gpu, hypotheses, launches, measure, spell
from tests.gpu.job import Job, Numbers
from tests.gpu.torch_engine import GpuEngine, TorchEngine, WatchedCuda
from tests.tensorrt.session.trt_double import trt_session
from tfexport.bundle.bundle import open_bundle
from tfexport.contract import Device, Variant
from tfexport.precision import FLOAT, ITEM_BYTES, Precision
from tfexport.runtime.cpu import step_weight_bytes
from tfexport.runtime.registry import Graphs, LoadOptions, open_session
from tfexport.tensorrt.config import Target

# Random weights of the paper's base model: its decodes seldom end by themselves.
MEASURED = "paper-base"
# Longer than the decodes, and short enough for one capacity, so that engines are built quickly.
ENGINE_SHAPES = {"max_batch": 128, "max_source_length": 64, "max_target_length": 64}
LARGE_SHAPES = {"max_batch": 32, "max_source_length": 512, "max_target_length": 64}

VARIANTS: tuple[Variant, ...] = ("static", "concat")

Open = Callable[[], tuple[Any, float]]  # a session, and the bytes of weights that its step reads


def latency(job: Job, target: Target, precision: Precision, *, in_int8: bool = False) -> None:
    """Compare engines with and without CUDA graphs."""
    from tfexport.tensorrt.session._engine import CudaGraphRunner

    def queue_each(self: CudaGraphRunner, name: str, queue: Callable[[], None], can_capture: object) -> None:
        queue()

    bundle = job.bundle(MEASURED, precision)
    narrow = {"weights": "int8"} if in_int8 else {}
    name = job.engine(bundle, target, "static", precision, **ENGINE_SHAPES, **narrow)
    if name is None:
        return
    backend = f"{target} {precision}{', weights int8' if in_int8 else ''}"
    read = weight_bytes(bundle, precision) / (ITEM_BYTES[FLOAT[precision]] if in_int8 else 1)
    with opened_once(lambda: (decodes.open_engine(bundle, name), read)) as session:

        def compare(numbers: Numbers) -> None:
            with_graphs = [hypotheses(session()[0], 8, beams) for beams in (1, 4)]
            with mock.patch.object(CudaGraphRunner, "run", queue_each):
                assert with_graphs == [hypotheses(session()[0], 8, beams) for beams in (1, 4)]

        timed(job, backend, session)
        job.check(f"{backend}: equal tokens with and without CUDA graphs", compare)
        with mock.patch.object(CudaGraphRunner, "run", queue_each):
            timed(job, f"{backend} without CUDA graphs", session)
        profiled(job, backend, session)


@contextmanager
def opened_once(make: Open) -> Iterator[Open]:
    """Yield a function that opens a session in the first check that has not ended, and returns it in others."""
    with ExitStack() as stack:

        def make_once() -> tuple[Any, float]:
            session, read = make()
            stack.callback(session.close)
            return session, read

        yield functools.cache(make_once)


def timed(job: Job, backend: str, session: Open, before: Callable[[], object] = lambda: None) -> None:
    """Measure each setting in a check of its own."""

    def time(setting: Setting, numbers: Numbers) -> None:
        before()
        opened, read = session()
        numbers.update(backend=backend, setting=spell(*setting), **measure(opened, read, setting))

    for setting in decodes.SETTINGS:
        job.check(f"{backend}, {spell(*setting)}", functools.partial(time, setting))


def profiled(job: Job, backend: str, session: Open) -> None:
    """Count launches after all times were measured, because a profiler changes them."""

    def count(setting: Setting, numbers: Numbers) -> None:
        found = launches(session()[0], given_to_gpu, setting)
        numbers.update({} if found is None else {"backend": backend, "setting": spell(*setting), "launches": found})

    for setting in decodes.LAUNCHES:
        job.check(f"{backend}, {spell(*setting)}: launches", functools.partial(count, setting))


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


weights_latency = functools.partial(latency, precision="fp16", in_int8=True)


def double_latency(
    job: Job, precision: Precision, cuda: Callable[[], Any] = WatchedCuda, engine: type[TorchEngine] = GpuEngine
) -> None:
    """Measure the session for TensorRT on engines of PyTorch."""

    def make() -> tuple[Any, float]:
        path = job.bundle(MEASURED, precision)
        graphs = Graphs.of(open_bundle(path))
        shapes: dict[str, Any] = {"max_batch": 128, "max_shapes": "num_candidates:16"}
        session = trt_session(graphs.paths, graphs.spec, "static", cuda=cuda(), kind=engine, **shapes)
        return session, weight_bytes(path, precision)

    with opened_once(make) as session:
        timed(job, f"engine double {precision}", session)
        profiled(job, f"engine double {precision}", session)


def ort_latency(job: Job, precision: Precision, device: Device = "cuda") -> None:
    for variant in VARIANTS:

        def make(variant: Variant = variant) -> tuple[Any, float]:
            path = job.bundle(MEASURED, precision)
            session = open_session(open_bundle(path), LoadOptions(backend="ort", variant=variant, device=device))
            return session, weight_bytes(path, precision)

        with opened_once(make) as session:
            timed(job, f"ort {device} {variant} {precision}", session)
            profiled(job, f"ort {device} {variant} {precision}", session)


def eager_latency(job: Job, precision: Precision, device: str = "cuda") -> None:
    with opened_once(functools.partial(eager_session, precision, device)) as session:
        timed(job, f"eager {precision}", session)
        profiled(job, f"eager {precision}", session)


def compile_latency(job: Job, precision: Precision, device: str = "cuda") -> None:
    """Measure torch.compile; a function that is compiled too often fails, because PyTorch would go on without."""
    import torch._dynamo

    def make() -> tuple[Any, float]:
        session, read = eager_session(precision, device)
        model = session.open_model()
        model.decode_step = torch.compile(model.decode_step, dynamic=True, fullgraph=True)
        return session, read

    # Otherwise a probability of dropout is a variable, whose comparison ends the graph in each attention.
    strict = torch._dynamo.config.patch(specialize_float=True, fail_on_recompile_limit_hit=True)
    with strict, opened_once(make) as session:
        # Each setting compiles again, because all of them together reach the limit of compilations.
        timed(job, f"torch.compile {precision}", session, before=torch.compiler.reset)
        profiled(job, f"torch.compile {precision}", session)


def eager_session(precision: Precision, device: str) -> tuple[Any, float]:
    import torch

    from tests.gpu.models import random_model
    from tfexport.nn.config import model_spec
    from tfexport.runtime.eager import EagerSession

    model = random_model(MEASURED).to(device=device, dtype=getattr(torch, FLOAT[precision]))
    return EagerSession(model, model_spec(model.config, precision)), parameter_bytes(model)


def large(job: Job, function: str, *arguments: Any) -> None:
    """Call a function of this module on a model of the size of BART-large-CNN."""
    from tests.gpu.models import LARGE, large_decodes

    here = sys.modules[__name__]
    with large_decodes(), mock.patch.multiple(here, MEASURED=LARGE, ENGINE_SHAPES=LARGE_SHAPES):
        getattr(here, function)(job, *arguments)
