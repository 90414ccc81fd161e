"""The open loop: requests arrive when they like, whether earlier ones have been answered or not."""

from __future__ import annotations

import asyncio
import statistics
from array import array
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import TypeAlias

import numpy as np

from tfexport.bench.config import MAX_REQUESTS
from tfexport.bench.samples import Samples
from tfexport.bench.scenario import WINDOWS
from tfexport.errors import EngineFailed, ServingError

Source: TypeAlias = str | Sequence[int]
# Seconds beyond its own length after which a run that falls behind is given up.
GRACE_S = 10
# At which the requests under way are counted.
MOMENTS = 101


@dataclass(frozen=True)
class Answer:
    """What came of one request; times are those of the event loop.

    Attributes:
        first_token: when its first token was there; None where that cannot be known.
        ended: when it was there as a whole.
        source_tokens: of its source; 0 where they are not known.
        tokens: that are new in it.
    """

    first_token: float | None
    ended: float
    source_tokens: int
    tokens: int


Ask: TypeAlias = Callable[[Source], Awaitable[Answer]]


def poisson(rate: float, seconds: float, seed: int) -> array[float]:
    """Draw when requests arrive: independently of one another, `rate` a second on average.

    Args:
        rate: requests a second.
        seconds: length of the schedule.
        seed: the same seed draws the same schedule.

    Returns:
        Seconds after the beginning, ascending; at least one.
    """
    rng = np.random.default_rng(seed)
    arrivals = array("d", [rng.exponential(1 / rate)])
    while arrivals[-1] < seconds and len(arrivals) < 2 * MAX_REQUESTS:
        arrivals.append(arrivals[-1] + rng.exponential(1 / rate))
    return arrivals[:-1] or arrivals


async def open_loop(ask: Ask, sources: Sequence[Source], arrivals: Sequence[float]) -> Samples:
    """Ask on a schedule.

    All times count from the scheduled arrival, so waiting is part of them, wherever it happens. A run that falls
    behind by its own length and 10 seconds more is given up, and what is left is cancelled.

    Args:
        ask: answers one source; raises `ServingError` for one that is not answered.
        sources: of the requests, taken in turn.
        arrivals: seconds after the beginning, ascending.

    Returns:
        One request an arrival that was answered; the windows are median latencies of equally many arrivals.

    Raises:
        TfexportError: the first other error of `ask`, and `EngineFailed`, after which nothing is answered.
    """
    run = _Run(ask, asyncio.get_running_loop().time())
    try:
        async with asyncio.timeout(2 * arrivals[-1] + GRACE_S), asyncio.TaskGroup() as group:
            for arrival, source in zip(arrivals, cycle(sources), strict=False):
                # A turn of the loop even where it is late: the others have to go on.
                await asyncio.sleep(max(0.0, run.began + arrival - asyncio.get_running_loop().time()))
                group.create_task(run.one(run.began + arrival, source))
    except TimeoutError:
        pass
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return run.summed_up(len(arrivals))


@dataclass
class _Run:
    """The requests of one open loop.

    Attributes:
        ask: answers one source.
        began: when the schedule did.
        answers: with when each should have been asked for.
        refused: requests that were.
    """

    ask: Ask
    began: float
    answers: list[tuple[float, Answer]] = field(default_factory=list)
    refused: int = 0

    async def one(self, arrived: float, source: Source) -> None:
        """Ask, and note what comes."""
        try:
            self.answers.append((arrived, await self.ask(source)))
        except EngineFailed:
            raise
        except ServingError:
            self.refused += 1

    def summed_up(self, count: int) -> Samples:
        """Return the samples of all requests, of which there were `count`."""
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
        found.windows = _medians(found.latency_s)
        found.waiting, found.running = self._in_flight(found.elapsed_s)
        return found

    def _in_flight(self, seconds: float) -> tuple[array[float], array[float]]:
        """Count the requests without a token, and those with some but not all, at equal distances."""
        times = self.began + np.linspace(0, seconds, MOMENTS)
        arrived = [at for at, _ in self.answers]
        first = [answer.ended if answer.first_token is None else answer.first_token for _, answer in self.answers]
        ended = [answer.ended for _, answer in self.answers]
        counts = [np.searchsorted(np.sort(moments), times, side="right") for moments in (arrived, first, ended)]
        return array("d", counts[0] - counts[1]), array("d", counts[1] - counts[2])


def _medians(latencies: Sequence[float]) -> array[float]:
    """Return the median of each tenth of the requests, in the order of their arrival; nothing below three tenths."""
    size = len(latencies) // WINDOWS
    return array("d", [statistics.median(latencies[i * size : (i + 1) * size]) for i in range(WINDOWS if size else 0)])
