"""Run the session for TensorRT on engines of PyTorch.

On a GPU, this checks captures, replays, overlapped steps and buffers without TensorRT. Without a GPU, the same checks
run on the host and show that the engines compute the right values.
"""

from __future__ import annotations

import functools
import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import tiny
from tests.gpu.behavior import together
from tests.gpu.job import Job
from tests.gpu.torch_engine import GpuEngine, TorchEngine, WatchedCuda
from tests.runtime import test_contract as contract
from tests.runtime.exported import Once, exported
from tests.runtime.joining import alone, differing, joining, random_requests
from tests.tensorrt.cuda_double import CudaDouble
from tests.tensorrt.session import test_batch, test_decode, test_session
from tests.tensorrt.session.conftest import Model
from tests.tensorrt.session.trt_double import LIBRARY, DoubleSession, make_engines, trt_session
from tfexport.contract import Variant
from tfexport.decode.offline import decode
from tfexport.generation import DecodeConfig
from tfexport.tensorrt.config import EngineConfig
from tfexport.tensorrt.session.session import TrtSession

VARIANTS: tuple[Variant, ...] = ("static", "concat")
# Memory that stays allocated between sessions, for the code of kernels.
SLACK_BYTES = 16 << 20
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 4, "num_return_sequences": 2},
    "odd beams": {"num_beams": 3, "length_penalty": 0.5, "early_stopping": "never"},
    "samples": {"do_sample": True, "top_k": 5, "num_return_sequences": 3, "seed": 1},
}


class UncapturableEngine(TorchEngine):
    is_capturable = False


class WaitingEngine(GpuEngine):
    """An engine that waits for the GPU, which ends every capture."""

    def run(self, arrays: Any) -> None:
        super().run(arrays)
        torch.cuda.current_stream().synchronize()


@dataclass(frozen=True)
class Place:
    cuda: Callable[[], Any]
    engine: type[TorchEngine]
    uncapturable: type[TorchEngine]  # its capture fails
    synchronize: Callable[[], None]
    free_bytes: Callable[[], int]


def free_gpu_bytes() -> int:
    """Return the free memory of the GPU after PyTorch has freed its caches."""
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


HOST = Place(CudaDouble, TorchEngine, UncapturableEngine, lambda: None, lambda: 0)
GPU = Place(WatchedCuda, GpuEngine, WaitingEngine, torch.cuda.synchronize, free_gpu_bytes)


class PlacedModel(Model):
    def __init__(self, bundle: Path, place: Place) -> None:
        super().__init__(bundle)
        self.place = place

    def trt(self, variant: Variant = "static", **options: Any) -> DoubleSession:
        return super().trt(variant, **{"kind": self.place.engine, "cuda": self.place.cuda(), **options})

    def tokens(self, session: Any, **options: Any) -> list[list[tuple[int, ...]]]:
        config = DecodeConfig(**options)
        return [[each.token_ids for each in text] for text in decode(session, self.sources, config, batch_size=7)]


def decodes(dates: PlacedModel, variant: Variant) -> None:
    expected, session = test_decode.dates_ort(dates, variant), dates.trt(variant, max_batch=32)
    for name, options in OPTIONS.items():
        assert dates.tokens(session, **options) == dates.tokens(expected, **options), name
    session.close()
    assert session.cuda.is_empty


def batch_sizes(dates: PlacedModel) -> None:
    session, config = dates.trt(max_batch=6), DecodeConfig()
    expected = [decode(session, [source], config)[0][0].token_ids for source in dates.sources]
    for batch_size in (2, 3, 5, 6):
        found = decode(session, dates.sources, config, batch_size=batch_size)
        assert [text[0].token_ids for text in found] == expected


def joins(dates: PlacedModel) -> None:
    session = dates.trt(max_batch=24)
    for seed in range(2):
        requests = random_requests(session, 24, seed)
        assert not differing(joining(session, requests, seed), alone(session, requests))
    session.close()


def poison(dates: PlacedModel) -> None:
    rng = np.random.default_rng(0)
    asked, session = test_batch.requests(dates, rng, 20), dates.trt(max_batch=5)
    for batch in test_batch.serve(session, dates, list(asked), rng, slots=5):
        test_batch.poison(batch, dates.spec)
        dates.place.synchronize()
    for request in asked:
        assert request.tokens == dates.greedy(request.source, request.prompt, request.limit)
    session.close()


def replays(dates: PlacedModel) -> None:
    session = dates.trt()
    cuda = session.cuda
    test_session.greedy_steps(session, dates, 6)
    assert cuda.counts["launch"] >= 5, "all but the first"
    found = []
    for _ in range(2):
        gc.collect()
        captured, launched = cuda.counts["capture"], cuda.counts["launch"]
        test_session.greedy_steps(session, dates, 6)
        found.append((cuda.counts["capture"] - captured, cuda.counts["launch"] - launched))
    assert found[0][0] <= 1, "a first step from the host"
    assert found[1] == (0, found[0][1]), "nothing new"
    assert found[1][1] >= 6
    session.close()


def overlap(dates: PlacedModel) -> None:
    for width in (1, 2):
        test_session.test_an_overlapped_step_is_dropped_when_the_host_decides_otherwise(dates, width)
    test_session.test_a_source_that_joins_does_not_get_the_step_of_its_slot(dates)


def beams(dates: PlacedModel) -> None:
    for variant in VARIANTS:
        test_batch.test_beams_branch_while_sources_join_and_leave(dates, variant, 3, 0)


def failed_capture(dates: PlacedModel) -> None:
    graphs = dates.trt()
    for options in ({}, {"num_beams": 3}):
        expected, session = dates.tokens(graphs, **options), dates.trt(kind=dates.place.uncapturable)
        with warnings_of("tfexport") as warnings:
            for _ in range(2):
                assert dates.tokens(session, **options) == expected
        assert len(warnings) == 1, warnings
        assert "without CUDA graphs" in warnings[0]
        assert session.cuda.counts["launch"] == 0
        session.close()
        assert session.cuda.is_empty


def threads(dates: PlacedModel) -> None:
    cuda, config = dates.place.cuda(), EngineConfig(max_batch=32)
    engines, limits = make_engines(dates.graphs, dates.spec, "static", config, cuda, [], dates.place.engine)
    opened = [TrtSession(engines, dates.spec, "static", limits, LIBRARY, cuda) for _ in range(2)]
    together(opened)
    for session in opened:
        session.close()
    assert cuda.is_empty


def memory(dates: PlacedModel) -> None:
    def use() -> None:
        session = dates.trt()
        for options in ({}, {"num_beams": 4}):
            dates.tokens(session, **options)
        assert session.memory_bytes() == session.cuda.device_bytes
        session.close()
        assert session.cuda.is_empty

    use()
    before = dates.place.free_bytes()
    use()
    assert dates.place.free_bytes() >= before - SLACK_BYTES


def leftovers(dates: PlacedModel) -> None:
    session = dates.trt()
    batch, start = dates.started(session, 2)
    former: Any = batch._replica
    device = former._device
    session.cuda.synchronize(device.stream)
    for name in ("past_key.0", "past_value.0", "cross_key.0"):
        session.cuda.view(device.memory[name], device.memory._sizes[name], on_device=True)[:] = 0xFF
    dates.place.synchronize()
    del batch
    gc.collect()
    again, _ = dates.started(session, 2)
    assert again._replica is former
    test_batch.assert_as_alone(dates, again.step(start, 4), dates.sources[:2], [[dates.start]] * 2)
    test_session.test_contexts_are_freed_with_their_graphs(dates)


CHECKS: dict[str, Callable[[PlacedModel], None]] = {
    "decodes, static": functools.partial(decodes, variant="static"),
    "replays": replays,
    "overlapped steps are dropped": overlap,
    "a capture that fails": failed_capture,
    "sources join and leave": joins,
    "NaN in free slots": poison,
    "beams branch": beams,
    "decodes, concat": functools.partial(decodes, variant="concat"),
    "threads": threads,
    "memory": memory,
    "former batches": leftovers,
    "batch sizes": batch_sizes,
}


@contextmanager
def warnings_of(name: str) -> Iterator[list[str]]:
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(name).addHandler(handler)
    try:
        yield warnings
    finally:
        logging.getLogger(name).removeHandler(handler)


def check_contract(session: Any, model: Any) -> None:
    contract.test_steps_equal_the_full_forward(session, model, 2, 4)
    contract.test_steps_equal_the_full_forward(session, model, 5, 3)
    for width, order in contract.ORDERS.values():
        contract.test_reorder(session, model, width, order)
    contract.test_sources_join_while_others_are_decoded(session, model)
    contract.test_remove((session, model), 2, [3, 0, 1])
    contract.test_an_empty_batch_starts_again((session, model))
    contract.test_candidates_belong_to_the_caller((session, model))
    contract.test_threads_share_a_session((session, model))
    contract.test_limits(session, model)


def contract_session(place: Place, variant: Variant, once: Once) -> tuple[Any, Any]:
    model = tiny.model(tiny.VARIANTS["mixed"], dtype=torch.float32)
    graphs, spec = exported(model, once)
    return trt_session(graphs, spec, variant, cuda=place.cuda(), kind=place.engine), model


# The tests of the session cover the others with ONNX Runtime.
ON_HOST = ("decodes, static", "decodes, concat", "replays", "a capture that fails", "memory", "former batches")


@pytest.mark.parametrize(
    "name", [name if name in ON_HOST else pytest.param(name, marks=pytest.mark.slow) for name in CHECKS]
)
def test_on_the_host(name: str, dates_bundle: Path) -> None:
    CHECKS[name](PlacedModel(dates_bundle, HOST))


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_contract_on_the_host(variant: Variant, once: Once) -> None:
    check_contract(*contract_session(HOST, variant, once))


def engine_double(job: Job) -> None:
    bundle = job.bundle("dates")
    for name, check in CHECKS.items():
        job.check(name, lambda numbers, check=check: check(PlacedModel(bundle, GPU)))

    def once(name: str, make: Callable[[Path], object]) -> Path:
        path = job.work / "bundles" / name
        if not path.exists():
            make(path)
        return path

    for variant in VARIANTS:
        job.check(f"contract, {variant}", lambda _, v=variant: check_contract(*contract_session(GPU, v, once)))
