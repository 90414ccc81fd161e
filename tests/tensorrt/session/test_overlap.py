"""Test when an overlapped step is started early, used and dropped."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.tensorrt.cuda_double import CudaDouble
from tfexport.contract import CACHE_LENGTHS, CANDIDATE_IDS, TARGET_IDS, ModelSpec, TokenIds
from tfexport.tensorrt.session._resources import part
from tfexport.tensorrt.session._step import SURE_AFTER, OverlappedStep, Sizes, StepIO

TOKENS = TokenIds(pad=0, start=1, eos=2)
SIZES = {"source_vocab": 9, "vocab": 9, "d_model": 4, "layers": 1, "heads": 1, "head_dim": 4, "value_dim": 4}
SPEC = ModelSpec(**SIZES, max_source_length=1, max_target_length=9, tokens=TOKENS, precision="fp32")


class Step:
    """A step of two rows whose best token is always the last one plus one."""

    def __init__(self, cuda: CudaDouble, stream: int, capacity: int, num_candidates: int = 1) -> None:
        self.sizes, self.cuda, self.stream = Sizes(2, 2, 1, 1, num_candidates, capacity), cuda, stream
        self.inputs, self.outputs = self.sizes.packed(SPEC, "static")
        self.calls: list[tuple[str, list[int], int]] = []
        self.newest = np.zeros(2, np.int64)

    def feed(self, io: StepIO, target_ids: np.ndarray, lengths: np.ndarray) -> None:
        given = part(io.inputs, self.inputs, TARGET_IDS)
        given[:, 0] = target_ids
        self._queue("feed", io, lengths, given[:, 0].copy)

    def follow(self, io: StepIO, lengths: np.ndarray, number: int) -> None:
        self._queue(f"follow {number}", io, lengths, lambda: self.newest)

    def best(self, io: StepIO) -> np.ndarray:
        return part(io.outputs, self.outputs, CANDIDATE_IDS)[:, 0].copy()

    def _queue(self, name: str, io: StepIO, lengths: np.ndarray, read: Any) -> None:
        self.calls.append((name, lengths.tolist(), id(io)))
        queued, expected = part(io.inputs, self.inputs, CACHE_LENGTHS), lengths.copy()
        queued[:] = lengths

        def work() -> None:
            assert (queued == expected).all(), "the step I/O was written while it was in use"
            self.newest = read() + 1
            ids = self.newest[:, None] + np.arange(self.sizes.num_candidates)
            part(io.outputs, self.outputs, CANDIDATE_IDS)[:] = ids

        self.cuda.enqueue(self.stream, work)
        io.record(self.stream)


@pytest.fixture(params=[False, True], ids=["late", "at once"])
def cuda(request: pytest.FixtureRequest) -> CudaDouble:
    return CudaDouble(prompt=request.param)


def make(cuda: CudaDouble, num_candidates: int = 1, capacity: int = 100) -> tuple[OverlappedStep, Step]:
    device = SimpleNamespace(cuda=cuda, event=cuda.event, pinned=lambda size, dtype: cuda.pinned((size,), dtype))
    ios = [StepIO(device, 1024, 1024) for _ in range(2)]  # type: ignore[arg-type]
    return OverlappedStep((ios[0], ios[1])), Step(cuda, cuda.stream(), capacity, num_candidates)


READ = np.array([0, 1])


def ints(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def test_overlapped_steps_are_fed_once_and_stop_at_the_last_position(cuda: CudaDouble) -> None:
    """Rows at different positions; the longest one decides when there is no next step."""
    runner, step = make(cuda, capacity=6)
    ids = ints(10, 20)
    for past_len in range(5):
        ids = step.best(runner.run(step, ids, READ, ints(past_len + 1, past_len), lambda: step))
        assert ids.tolist() == [11 + past_len, 21 + past_len]
    assert [name for name, *_ in step.calls] == ["feed", "follow 1", "follow 0", "follow 1", "follow 0"]
    assert [lengths for _, lengths, _ in step.calls] == [[past_len + 1, past_len] for past_len in range(5)]


def follow_best(runner: OverlappedStep, step: Step, ids: np.ndarray, first: int, last: int) -> np.ndarray:
    for past_len in range(first, last):
        ids = step.best(runner.run(step, ids, READ, ints(past_len, past_len), lambda: step))
    return ids


def test_several_candidates_overlap_after_the_best_was_used_for_a_while(cuda: CudaDouble) -> None:
    runner, step = make(cuda, 4)
    ids = follow_best(runner, step, ints(10, 20), 0, SURE_AFTER)
    assert {name for name, *_ in step.calls} == {"feed"}, "not sure yet"
    ids = follow_best(runner, step, ids, SURE_AFTER, SURE_AFTER + 3)
    assert [name for name, *_ in step.calls][SURE_AFTER:] == ["feed", "follow 1", "follow 0", "follow 1"]
    assert ids.tolist() == [10 + SURE_AFTER + 3, 20 + SURE_AFTER + 3]
    found = runner.run(step, ids + ints(0, 2), READ, ints(SURE_AFTER + 3, SURE_AFTER + 3), lambda: step)
    assert step.best(found).tolist() == [ids[0] + 1, ids[1] + 3], "one row has another token: the step is fed"
    assert [name for name, *_ in step.calls][-1] == "feed", "and the next one is not begun"
