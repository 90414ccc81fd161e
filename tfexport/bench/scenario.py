"""The ways to load a model: one call after the other, or requests that arrive when they like."""

from __future__ import annotations

import statistics
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle

import numpy as np

from tfexport.bench.config import MAX_REQUESTS
from tfexport.bench.samples import Call, Samples

Source = Sequence[int]
MakeCall = Callable[[Sequence[Source]], Call]
Clock = Callable[[], float]

WINDOWS = 10
MIN_WINDOWS = 3


def closed_loop(
    call: MakeCall, batches: Sequence[Sequence[Source]], seconds: float, *, clock: Clock = time.perf_counter
) -> Samples:
    """Make one call after the other, the next as soon as the last has returned.

    Args:
        call: decodes one batch.
        batches: taken in turn.
        seconds: how long; at least three windows of a tenth of it are measured, each of whole calls.
        clock: seconds.

    Returns:
        One request a call; the windows are tokens a second.
    """
    samples, pool = Samples(), cycle(batches)
    began = clock()
    while len(samples.windows) < MIN_WINDOWS or (clock() - began < seconds and samples.calls < MAX_REQUESTS):
        samples.windows.append(_window(call, pool, samples, seconds / WINDOWS, clock))
    samples.elapsed_s = clock() - began
    return samples


def _window(call: MakeCall, pool: Iterator[Sequence[Source]], samples: Samples, seconds: float, clock: Clock) -> float:
    began, tokens = clock(), samples.tokens
    while True:
        samples.add(call(next(pool)))
        elapsed = clock() - began
        if elapsed >= seconds:
            return (samples.tokens - tokens) / elapsed


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


def open_loop(
    call: MakeCall,
    sources: Sequence[Source],
    arrivals: Sequence[float],
    batch_size: int,
    *,
    clock: Clock = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> Samples:
    """Answer requests that arrive on a schedule, whether earlier ones have been answered or not.

    What is waiting when the model is free is decoded together. All times count from the scheduled arrival, so
    waiting is part of them. A run that falls behind by its own length and 10 seconds more is given up.

    Args:
        call: decodes one batch.
        sources: of the requests, taken in turn.
        arrivals: seconds after the beginning, ascending.
        batch_size: requests decoded together at most.
        clock: seconds.
        sleep: waits so many seconds.

    Returns:
        One request an arrival; the windows are median latencies of equally many requests.
    """
    samples, pool, answered = Samples(), cycle(sources), 0
    began = clock()
    give_up = began + 2 * arrivals[-1] + 10
    while answered < len(arrivals) and clock() < give_up:
        while (early := began + arrivals[answered] - clock()) > 0:
            sleep(early)
        now = clock() - began
        last = answered + 1
        while last < len(arrivals) and last < answered + batch_size and arrivals[last] <= now:
            last += 1
        done = call([next(pool) for _ in range(answered, last)])
        samples.add(done, tuple(began + arrival for arrival in arrivals[answered:last]))
        answered = last
    samples.elapsed_s = clock() - began
    samples.unserved = len(arrivals) - answered
    samples.windows = _medians(samples.latency_s)
    return samples


def _medians(latencies: Sequence[float]) -> array[float]:
    """Return the median of each tenth of the requests, in the order of their arrival; nothing below three tenths."""
    size = len(latencies) // WINDOWS
    return array("d", [statistics.median(latencies[i * size : (i + 1) * size]) for i in range(WINDOWS if size else 0)])
