"""From samples to the numbers of a report, each as {unit, value} or {unit, avg, p50, …}; names are those of AIPerf."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tfexport.bench.samples import Samples

Metric = dict[str, Any]
PERCENTILES = (50, 90, 95, 99)
# With fewer the 99th percentile is a guess from the last few.
P99_SAMPLES = 1000
STABLE_WITHIN = 0.10
STABLE_WINDOWS = 3
_BINS = 40
_UNSEEN = "not seen from outside the server"


def distribution(samples: Sequence[Sequence[float]], unit: str = "ms", scale: float = 1e3) -> Metric:
    """Summarise what several processes measured, taken together.

    Args:
        samples: of each process, in seconds.
        unit: that the result is given in.
        scale: from seconds to the unit.

    Returns:
        `avg`, `min`, `max`, `std`, `p50`, `p90`, `p95`, `p99`, `count`, and `per_process`, the p50 of each. Without
        samples everything is null; p99 is null below 1,000 samples, and `note` says so.
    """
    pooled = np.concatenate([np.asarray(values, np.float64) for values in samples]) * scale
    names = [f"p{percent}" for percent in PERCENTILES]
    if not pooled.size:
        empty = dict.fromkeys(("avg", "min", "max", "std", *names))
        return {"unit": unit, **empty, "count": 0, "per_process": [], "note": "no samples"}
    found: Metric = {
        "unit": unit,
        "avg": float(pooled.mean()),
        "min": float(pooled.min()),
        "max": float(pooled.max()),
        "std": float(pooled.std()),
        **dict(zip(names, map(float, np.percentile(pooled, PERCENTILES)), strict=True)),
        "count": pooled.size,
        "per_process": [float(np.median(values)) * scale for values in samples if len(values)],
    }
    if pooled.size < P99_SAMPLES:
        found |= {"p99": None, "note": f"p99 needs {P99_SAMPLES:,} samples, there are {pooled.size:,}"}
    return found


def value(number: float | None, unit: str, per_process: Sequence[float] = (), note: str = "") -> Metric:
    """Return one number, with what each process measured where they differ, and why it is null where it is."""
    found: Metric = {"unit": unit, "value": number}
    if per_process:
        found["per_process"] = list(per_process)
    return found | ({"note": note} if note else {})


def is_stable(windows: Sequence[float]) -> bool:
    """Say whether the last three windows are each within 10 % of their mean."""
    last = np.asarray(windows[-STABLE_WINDOWS:], np.float64)
    return len(last) == STABLE_WINDOWS and bool((np.abs(last - last.mean()) <= STABLE_WITHIN * last.mean()).all())


def server_metrics(runs: Sequence[Samples], goal_ms: float | None) -> dict[str, Metric]:
    """Return the metrics that a server has besides those of every cell.

    Args:
        runs: the samples of each process.
        goal_ms: within which an answer counts for goodput; None for no goal.
    """
    shares = [run.slot_occupancy for run in runs if run.slot_occupancy is not None]
    occupancy = value(float(np.mean(shares)), "ratio", shares) if shares else value(None, "ratio", note=_UNSEEN)
    queue = distribution([run.queue_s for run in runs])
    return {
        "goodput": _goodput(runs, goal_ms),
        "slot_occupancy": occupancy,
        "queue_time": queue if queue["count"] else queue | {"note": _UNSEEN},
        "refused": value(sum(run.refused for run in runs), "requests"),
    }


def _goodput(runs: Sequence[Samples], goal_ms: float | None) -> Metric:
    if goal_ms is None:
        return value(None, "requests/sec", note="needs a goal; give --goal-ms")
    good = [sum(1e3 * latency <= goal_ms for latency in run.latency_s) for run in runs]
    each = [count / run.elapsed_s for count, run in zip(good, runs, strict=True)]
    return value(sum(good) / sum(run.elapsed_s for run in runs), "requests/sec", each)


def throughput(runs: Sequence[Samples], attribute: str, unit: str) -> Metric:
    """Divide what all processes did by the time they took, processes being one after the other."""
    total = sum(getattr(run, attribute) for run in runs) / sum(run.elapsed_s for run in runs)
    return value(total, unit, [getattr(run, attribute) / run.elapsed_s for run in runs])


def cell_metrics(runs: Sequence[Samples]) -> dict[str, Metric]:
    """Return the metrics of one cell.

    Args:
        runs: the samples of each process.
    """
    sequences = sum(run.sequences for run in runs)
    return {
        "time_to_first_token": distribution([run.first_token_s for run in runs]),
        "inter_token_latency": distribution([run.per_token_s for run in runs]),
        "request_latency": distribution([run.latency_s for run in runs]),
        "output_token_throughput": throughput(runs, "tokens", "tokens/sec"),
        "request_throughput": throughput(runs, "sequences", "requests/sec"),
        "encode_time": distribution([run.encode_s for run in runs]),
        "step_time": distribution([run.step_s for run in runs]),
        "input_sequence_length": _source_length(runs, sequences),
        "output_sequence_length": value(sum(run.tokens for run in runs) / sequences, "tokens"),
        "request_count": value(sequences, "requests"),
        "benchmark_duration": value(sum(run.elapsed_s for run in runs), "sec"),
    }


def _source_length(runs: Sequence[Samples], sequences: int) -> Metric:
    total = sum(run.source_tokens for run in runs)
    return value(total / sequences, "tokens") if total else value(None, "tokens", note=_UNSEEN)


def time_split(runs: Sequence[Samples]) -> dict[str, float]:
    """Return the shares of encoder, decoder steps, reordering and the rest in the time of all calls, or of the run.

    Empty where they are not known.
    """
    busy = sum(run.busy_s for run in runs)
    if not busy:
        return {}
    shares = {
        "encode": sum(run.encoding_s for run in runs) / busy,
        "step": sum(run.stepping_s for run in runs) / busy,
        "reorder": sum(run.reordering_s for run in runs) / busy,
    }
    return {**shares, "rest": 1 - sum(shares.values())}


def step_time_by_position(runs: Sequence[Samples]) -> list[float]:
    """Return the median step time at each position in milliseconds, the first step being position 0.

    Empty in the server scenario, where the rows of a step stand at different positions.
    """
    positions = np.concatenate([_positions(run) for run in runs])
    times = np.concatenate([np.asarray(run.step_s)[: len(_positions(run))] for run in runs])
    order = np.argsort(positions, kind="stable")
    groups = np.split(times[order], np.cumsum(np.bincount(positions))[:-1]) if times.size else []
    return [float(np.median(group)) * 1e3 for group in groups]


def _positions(run: Samples) -> NDArray[np.int64]:
    counts = np.asarray(run.steps, np.int64)
    starts = np.array([0, *accumulate(counts.tolist())][:-1], np.int64)
    positions: NDArray[np.int64] = np.arange(counts.sum()) - starts.repeat(counts)
    return positions


def histogram(samples: Sequence[Sequence[float]]) -> dict[str, list[float]]:
    """Count latencies in bins of equal width from the least to the 99.5th percentile; what is above goes into the last.

    Returns:
        `edges_ms`, one more than `counts`.
    """
    pooled = np.concatenate([np.asarray(values, np.float64) for values in samples]) * 1e3
    if not pooled.size:
        return {"edges_ms": [], "counts": []}
    low = float(pooled.min())
    high = max(float(np.percentile(pooled, 99.5)), 1.01 * low + 1e-6)  # equal latencies still need a width
    bins = min(_BINS, max(5, pooled.size // 5))
    counts, edges = np.histogram(np.minimum(pooled, high), bins=bins, range=(low, high))
    return {"edges_ms": edges.tolist(), "counts": counts.tolist()}


def in_flight(run: Samples) -> dict[str, list[float]]:
    """Return the requests under way over the time of a run: `seconds`, `waiting` for a first token, and `running`."""
    seconds = np.linspace(0, run.elapsed_s, len(run.waiting)).tolist()
    return {"seconds": seconds, "waiting": run.waiting.tolist(), "running": run.running.tolist()}
