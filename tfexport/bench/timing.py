"""The timing harness: warm up, repeat, interleave, and say what the times mean.

What is timed is a stopwatch: it runs something once and returns the seconds that it took, so that what runs in another
process is timed there and only asked for here.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
Stopwatch = Callable[[], float]


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How often something is run.

    Attributes:
        warm_up: runs before, which are not counted.
        least_runs: that are counted.
        least_s: seconds that the counted runs take together, unless there are `most_runs`.
        most_runs: that are counted.
        long_s: a warm-up that takes so long suffers from no cold cache or clock: it counts, and is the only run.
    """

    warm_up: int = 1
    least_runs: int = 1
    least_s: float = 0.0
    most_runs: float = math.inf
    long_s: float = math.inf


@dataclass(frozen=True)
class Ratio:
    """How many times as long one takes as another: the median over rounds, with the lowest and the highest round."""

    median: float
    low: float
    high: float


def clock(call: Callable[[], T]) -> tuple[float, T]:
    """Return the seconds that a call takes, and what it returns."""
    began = time.perf_counter()
    found = call()
    return time.perf_counter() - began, found


def stopwatch(call: Callable[[], object]) -> Stopwatch:
    """Return a stopwatch of a call in this process."""
    return lambda: clock(call)[0]


def repeat(run: Stopwatch, effort: Effort) -> list[float]:
    """Run something as often as `effort` asks for.

    Returns:
        Seconds of each run that counts, in order.
    """
    for _ in range(effort.warm_up):
        seconds = run()
        if seconds >= effort.long_s:
            return [seconds]
    found: list[float] = []
    while len(found) < effort.least_runs or (sum(found) < effort.least_s and len(found) < effort.most_runs):
        found.append(run())
    return found


def interleaved(systems: Sequence[T], rounds: int) -> Iterator[tuple[int, T]]:
    """Give each of several systems its turn in every round.

    Every other round goes backwards: a machine that grows slower then favours none of them.

    Yields:
        The number of the round, from 0, and the system whose turn it is.
    """
    for number in range(rounds):
        for system in systems[::-1] if number % 2 else systems:
            yield number, system


def median(rounds: Iterable[Sequence[float]]) -> float:
    """Return the median over rounds of each round's median, of at least one round of at least one run."""
    return statistics.median(map(statistics.median, rounds))


def ratio(rounds: Sequence[Sequence[float]], others: Sequence[Sequence[float]]) -> Ratio:
    """Divide the medians of rounds by those of others in the same rounds; rounds that one has alone are left out."""
    each = [statistics.median(one) / statistics.median(other) for one, other in zip(rounds, others, strict=False)]
    return Ratio(statistics.median(each), min(each), max(each))


def geometric_mean(values: Iterable[float]) -> float:
    """Return the geometric mean of numbers above 0, of at least one."""
    return math.exp(statistics.fmean(map(math.log, values)))
