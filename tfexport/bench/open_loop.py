"""Send requests on a schedule, whether earlier ones have been answered or not, and search for the highest rate."""

from __future__ import annotations

import asyncio
import statistics
from array import array
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import TypeAlias

import numpy as np

from tfexport.bench.calls import WINDOWS, Samples
from tfexport.bench.config import MAX_REQUESTS
from tfexport.errors import BenchError, EngineFailed, ServingError

Source: TypeAlias = str | Sequence[int]
# A run is cancelled when it takes this many seconds more than twice its length.
GRACE_S = 10
# Points in time at which the requests in flight are counted.
MOMENTS = 101
# The search for the highest rate: precision, range, and requests per trial, enough for a 99th percentile.
CLOSE = 1.05
LEAST, MOST = 0.01, 100_000.0
LEAST_REQUESTS = 100


@dataclass(frozen=True)
class Answer:
    """The answer to one request; times are those of the event loop.

    Attributes:
        first_token: when the first token arrived; None if unknown.
        ended: when the answer was complete.
        source_tokens: tokens of the source; 0 if unknown.
        tokens: new tokens.
    """

    first_token: float | None
    ended: float
    source_tokens: int
    tokens: int


Ask: TypeAlias = Callable[[Source], Awaitable[Answer]]


def poisson(rate: float, seconds: float, seed: int) -> array[float]:
    """Draw arrivals of a Poisson process, in ascending seconds, at least one; the same seed draws the same ones."""
    rng = np.random.default_rng(seed)
    arrivals = array("d", [rng.exponential(1 / rate)])
    while arrivals[-1] < seconds and len(arrivals) < 2 * MAX_REQUESTS:
        arrivals.append(arrivals[-1] + rng.exponential(1 / rate))
    return arrivals[:-1] or arrivals


async def open_loop(ask: Ask, sources: Sequence[Source], arrivals: Sequence[float]) -> Samples:
    """Send requests on a schedule.

    All times count from the scheduled arrival, so they include waiting of every kind. The run is cancelled if it falls
    behind by its own length and 10 seconds more.

    Args:
        ask: answers one source; raises `ServingError` if the request is refused.
        sources: taken in turn.
        arrivals: seconds after the start, ascending.

    Returns:
        One request per answer; the windows are median latencies of equal numbers of arrivals.

    Raises:
        TfexportError: the first other error of `ask`, and `EngineFailed`.
    """
    run = _Run(ask, asyncio.get_running_loop().time())
    try:
        async with asyncio.timeout(2 * arrivals[-1] + GRACE_S), asyncio.TaskGroup() as group:
            for arrival, source in zip(arrivals, cycle(sources), strict=False):
                # Yield to the loop even when late, so that other requests make progress.
                await asyncio.sleep(max(0.0, run.began + arrival - asyncio.get_running_loop().time()))
                group.create_task(run.one(run.began + arrival, source))
    except TimeoutError:
        pass
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return run.samples(len(arrivals))


@dataclass
class _Run:
    ask: Ask
    began: float
    answers: list[tuple[float, Answer]] = field(default_factory=list)  # with their scheduled arrivals
    refused: int = 0

    async def one(self, arrived: float, source: Source) -> None:
        try:
            self.answers.append((arrived, await self.ask(source)))
        except EngineFailed:
            raise
        except ServingError:
            self.refused += 1

    def samples(self, count: int) -> Samples:
        found, answers = Samples(), sorted(self.answers, key=lambda pair: pair[0])
        for arrived, answer in answers:
            found.latency_s.append(answer.ended - arrived)
            if answer.first_token is not None:
                found.first_token_s.append(answer.first_token - arrived)
                if answer.tokens > 1:
                    found.per_token_s.append((answer.ended - answer.first_token) / (answer.tokens - 1))
            found.source_tokens += answer.source_tokens
            found.tokens += answer.tokens
        found.sequences = len(answers)
        found.elapsed_s = max((answer.ended for _, answer in answers), default=self.began) - self.began
        found.refused, found.unserved = self.refused, count - self.refused - len(answers)
        size = len(found.latency_s) // WINDOWS
        parts = [found.latency_s[i * size : (i + 1) * size] for i in range(WINDOWS if size else 0)]
        found.windows = array("d", map(statistics.median, parts))
        found.waiting, found.running = self._in_flight(found.elapsed_s)
        return found

    def _in_flight(self, seconds: float) -> tuple[array[float], array[float]]:
        """Count requests without a first token, and requests with one that are not finished."""
        times = self.began + np.linspace(0, seconds, MOMENTS)
        arrived = [at for at, _ in self.answers]
        first = [answer.ended if answer.first_token is None else answer.first_token for _, answer in self.answers]
        ended = [answer.ended for _, answer in self.answers]
        counts = [np.searchsorted(np.sort(moments), times, side="right") for moments in (arrived, first, ended)]
        return array("d", counts[0] - counts[1]), array("d", counts[1] - counts[2])


@dataclass(frozen=True)
class Trial:
    """A rate that was tried.

    Attributes:
        rate: requests per second.
        p99_ms: 99th percentile of the latencies; None if a request was not answered.
        kept: whether all requests were answered and p99 was within the bound.
    """

    rate: float
    p99_ms: float | None
    kept: bool


def judge(rate: float, samples: Samples, bound_ms: float) -> Trial:
    """Decide whether a rate kept the bound."""
    if samples.refused or samples.unserved:
        return Trial(rate, None, kept=False)
    p99_ms = float(np.percentile(samples.latency_s, 99)) * 1e3
    return Trial(rate, p99_ms, p99_ms <= bound_ms)


async def highest_rate(attempt: Callable[[float], Awaitable[Trial]], first: float) -> list[Trial]:
    """Double the rate until a trial fails, then bisect; return all trials.

    Raises:
        BenchError: no rate keeps the bound.
    """
    trials = [await attempt(min(max(first, LEAST), MOST))]
    while all(trial.kept for trial in trials) and trials[-1].rate < MOST:
        trials.append(await attempt(min(2 * trials[-1].rate, MOST)))
    while not any(trial.kept for trial in trials):
        if trials[-1].rate <= LEAST:
            raise BenchError("bench: no rate of requests keeps the bound; raise --goal-p99")
        trials.append(await attempt(max(trials[-1].rate / 2, LEAST)))
    while (gap := _lowest_failed(trials) / best(trials).rate) > CLOSE:
        trials.append(await attempt(best(trials).rate * gap**0.5))
    return trials


def best(trials: list[Trial]) -> Trial:
    """Return the kept trial with the highest rate below every failed one."""
    failed = _lowest_failed(trials)
    return max((trial for trial in trials if trial.kept and trial.rate < failed), key=lambda trial: trial.rate)


def _lowest_failed(trials: list[Trial]) -> float:
    return min((trial.rate for trial in trials if not trial.kept), default=MOST)
