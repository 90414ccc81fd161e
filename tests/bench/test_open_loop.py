"""Requests on a schedule."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Awaitable
from typing import Any

import numpy as np
import pytest

from tfexport.bench._loops import Answer, Source, open_loop, poisson
from tfexport.bench._report import is_stable
from tfexport.errors import EngineFailed, InputError, QueueFull


class Sleepless(selectors.SelectSelector):
    """Lets the time that nothing happens in pass at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0

    def select(self, timeout: float | None = None) -> Any:
        self.now += timeout or 0.0
        return super().select(0)


class Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.sleepless = Sleepless()
        super().__init__(self.sleepless)

    def time(self) -> float:
        return self.sleepless.now


def run(found: Awaitable[Any]) -> Any:
    async def awaited() -> Any:
        return await found

    with asyncio.Runner(loop_factory=Loop) as runner:
        return runner.run(awaited())


class OneByOne:
    """Answers one request after the other, four tokens in `seconds` each, the first after half of them."""

    def __init__(self, seconds: float, most: int = 1000) -> None:
        self.seconds, self.most = seconds, most
        self.asked: list[Source] = []
        self.waiting = 0
        self.turn = asyncio.Lock()

    async def __call__(self, source: Source) -> Answer:
        self.asked.append(source)
        if self.waiting == self.most:
            raise QueueFull("too many", retry_after_s=1)
        self.waiting += 1
        async with self.turn:
            self.waiting -= 1
            await asyncio.sleep(self.seconds / 2)
            first = asyncio.get_running_loop().time()
            await asyncio.sleep(self.seconds / 2)
            return Answer(first, asyncio.get_running_loop().time(), len(source), 4)


def test_arrivals_are_a_poisson_process_that_the_seed_repeats() -> None:
    arrivals = np.array(poisson(100, 60, 3))
    assert arrivals.tolist() == list(poisson(100, 60, 3))
    assert arrivals.tolist() != list(poisson(100, 60, 4))
    gaps = np.diff(arrivals)
    assert (gaps > 0).all()
    assert arrivals[-1] < 60
    assert arrivals.size == pytest.approx(6000, rel=0.05)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05)  # as of an exponential distribution
    assert np.mean(gaps > 0.01) == pytest.approx(np.exp(-1), abs=0.02)
    assert len(poisson(0.01, 0.1, 0)) == 1


def test_latency_grows_when_the_server_is_too_slow() -> None:
    server = OneByOne(1.0)
    found = run(open_loop(server, [[5], [6, 7]], [0.5 + 0.1 * index for index in range(10)]))
    assert list(found.latency_s) == pytest.approx([1 + 0.9 * index for index in range(10)])
    assert list(found.first_token_s) == pytest.approx([0.5 + 0.9 * index for index in range(10)])
    assert list(found.per_token_s) == pytest.approx([0.5 / 3] * 10)
    assert server.asked == [[5], [6, 7]] * 5
    assert not is_stable(found.windows)
    assert (found.unserved, found.refused, found.sequences) == (0, 0, 10)
    assert (found.source_tokens, found.tokens) == (15, 40)
    assert found.elapsed_s == pytest.approx(10.5)
    fast = run(open_loop(OneByOne(0.05), [[5]], [0.1 * index for index in range(1, 31)]))
    assert list(fast.latency_s) == pytest.approx([0.05] * 30)
    assert is_stable(fast.windows)


def test_refused_requests_are_counted_and_others_answered() -> None:
    found = run(open_loop(OneByOne(1.0, most=2), [[5]], [0.1 * index for index in range(8)]))
    assert (found.refused, found.sequences, found.unserved) == (5, 3, 0)
    assert list(found.latency_s) == pytest.approx([1.0, 1.9, 2.8])


def test_a_run_without_progress_is_aborted() -> None:
    found = run(open_loop(OneByOne(6.0), [[5]], [0.0, 0.1, 0.2, 0.3, 0.4]))
    assert (found.sequences, found.unserved) == (1, 4)


@pytest.mark.parametrize("error", [InputError("text 2 is too long"), EngineFailed("the engine has failed")])
def test_other_errors_end_the_run(error: Exception) -> None:
    async def fail(source: Source) -> Answer:
        raise error

    with pytest.raises(type(error)):
        run(open_loop(fail, [[5]], [0.0, 0.1]))
