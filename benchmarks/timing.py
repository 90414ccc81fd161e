"""Warm up, repeat, interleave and summarize timed runs.

A stopwatch is a function that runs something once and returns the seconds it took; it may ask another process.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

T = TypeVar("T")
Stopwatch = Callable[[], float]


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How often to run something.

    Attributes:
        warm_up: runs that do not count.
        least_runs: minimum of counted runs.
        least_s: minimum of seconds of all counted runs together, up to `most_runs`.
        most_runs: maximum of counted runs.
        long_s: a warm-up that takes at least this long counts and is the only run.
    """

    warm_up: int = 1
    least_runs: int = 1
    least_s: float = 0.0
    most_runs: float = math.inf
    long_s: float = math.inf


@dataclass(frozen=True)
class Ratio:
    """A ratio of two times: the median over rounds, and the lowest and highest round."""

    median: float
    low: float
    high: float


def clock(call: Callable[[], T]) -> tuple[float, T]:
    """Return the seconds of a call and its result."""
    began = time.perf_counter()
    found = call()
    return time.perf_counter() - began, found


def stopwatch(call: Callable[[], object]) -> Stopwatch:
    """Return a stopwatch of a call in this process."""
    return lambda: clock(call)[0]


def repeat(run: Stopwatch, effort: Effort) -> list[float]:
    """Run a stopwatch as often as `effort` says; return the seconds of each counted run."""
    for _ in range(effort.warm_up):
        seconds = run()
        if seconds >= effort.long_s:
            return [seconds]
    found: list[float] = []
    while len(found) < effort.least_runs or (sum(found) < effort.least_s and len(found) < effort.most_runs):
        found.append(run())
    return found


def interleaved(systems: Sequence[T], rounds: int) -> Iterator[tuple[int, T]]:
    """Yield the number of the round and a system, each system once per round.

    Every other round is in reverse order, so that a machine that slows down favors no system.
    """
    for number in range(rounds):
        for system in systems[::-1] if number % 2 else systems:
            yield number, system


def median(rounds: Iterable[Sequence[float]]) -> float:
    """Return the median over rounds of each round's median."""
    return statistics.median(map(statistics.median, rounds))


def ratio(rounds: Sequence[Sequence[float]], others: Sequence[Sequence[float]]) -> Ratio:
    """Divide the medians of rounds by those of the same rounds of another system; skip rounds that only one has."""
    each = [statistics.median(one) / statistics.median(other) for one, other in zip(rounds, others, strict=False)]
    return Ratio(statistics.median(each), min(each), max(each))


def geometric_mean(values: Iterable[float]) -> float:
    """Return the geometric mean of at least one positive number."""
    return math.exp(statistics.fmean(map(math.log, values)))


def memory_bandwidth(num_bytes: int, threads: int) -> float:
    """Measure how fast threads read memory, in bytes per second: the best of five rounds and of two ways to read.

    Args:
        num_bytes: read over and over; as much as a step reads, so that it is in the same caches; at least 1 MB.
        threads: that read.
    """
    memory = np.ones(max(num_bytes, 1_000_000) // 4, np.float32)
    parts, times = np.array_split(memory, threads), max(1, 400_000_000 // memory.nbytes)
    with ThreadPoolExecutor(len(parts)) as pool:

        def seconds(read: Callable[[np.ndarray], object]) -> float:
            def work(part: np.ndarray) -> None:
                for _ in range(times):
                    read(part)

            return min(repeat(stopwatch(lambda: list(pool.map(work, parts))), Effort(warm_up=0, least_runs=5)))

        fastest = min(seconds(lambda part: part.max(initial=0)), seconds(lambda part: part @ part))
    return times * memory.nbytes / fastest
