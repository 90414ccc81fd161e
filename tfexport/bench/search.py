"""The highest rate of requests that a server answers in time, as MLPerf's Server scenario looks for it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tfexport.bench.samples import Samples
from tfexport.errors import BenchError

# The rate is known well enough when one that fails is so little above it.
CLOSE = 1.05
LEAST, MOST = 0.01, 100_000.0
# Of a trial; with fewer its 99th percentile says nothing.
LEAST_REQUESTS = 100


@dataclass(frozen=True)
class Trial:
    """A rate that was tried.

    Attributes:
        rate: requests a second.
        p99_ms: of the latencies from the scheduled arrival; None where not all were answered.
        kept: whether all were answered, and p99 was within the bound.
    """

    rate: float
    p99_ms: float | None
    kept: bool

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return asdict(self)


def judge(rate: float, samples: Samples, bound_ms: float) -> Trial:
    """Say whether a rate kept a bound."""
    if samples.refused or samples.unserved:
        return Trial(rate, None, kept=False)
    p99_ms = float(np.percentile(samples.latency_s, 99)) * 1e3
    return Trial(rate, p99_ms, p99_ms <= bound_ms)


async def highest_rate(attempt: Callable[[float], Awaitable[Trial]], first: float) -> list[Trial]:
    """Double a rate until it fails, then halve the gap.

    Args:
        attempt: measures at a rate.
        first: rate to begin with, requests a second.

    Returns:
        All trials; `best` picks the highest rate that was kept.

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
    """Return the trial with the highest rate below all that failed."""
    failed = _lowest_failed(trials)
    return max((trial for trial in trials if trial.kept and trial.rate < failed), key=lambda trial: trial.rate)


def _lowest_failed(trials: list[Trial]) -> float:
    return min((trial.rate for trial in trials if not trial.kept), default=MOST)
