"""Build a JSON report from samples, with the metric names of AIPerf."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfexport.bench._loops import Samples
from tfexport.bench.config import BenchConfig, Cell

SCHEMA = "tfexport.bench/2"
Metric = dict[str, Any]
PERCENTILES = (50, 90, 95, 99)
P99_SAMPLES = 1000  # with fewer samples, the 99th percentile depends on only a few of them
STABLE_WITHIN, STABLE_WINDOWS = 0.10, 3
_BINS = 40
_UNSEEN = "not measured with --url"


def build_result(
    config: BenchConfig, results: Sequence[dict[str, Any]], about: dict[str, Any], parity: dict[str, Any]
) -> dict[str, Any]:
    """Build a report; `about` has its `bundle`, `input` and `environment`."""
    cells = [
        _cell(config, cell, [Samples(**process["cells"][index]) for process in results])
        for index, cell in enumerate(config.cells)
    ]
    process = _process_metrics(results)
    best = max(range(len(cells)), key=lambda index: cells[index]["metrics"]["output_token_throughput"]["value"])
    reasons = _doubts(config, cells, parity, has_bundle=about["bundle"].get("sha256") is not None)
    return {
        "schema": SCHEMA,
        "bundle": about["bundle"],
        "scenario": config.scenario,
        "settings": {**settings(config), "backend": results[0]["backend"], "input": about["input"]},
        "parity": parity,
        "environment": about["environment"],
        "validity": {"valid": not reasons, "reasons": reasons},
        "best_cell": best,
        "metrics": {**cells[best]["metrics"], **process},
        "cells": cells,
    }


def settings(config: BenchConfig) -> dict[str, Any]:
    """Return the settings of a report, without paths of secrets."""
    values = config.to_dict()
    del values["scenario"], values["token_file"], values["trusted_keys"]
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def _cell(config: BenchConfig, cell: Cell, runs: Sequence[Samples]) -> dict[str, Any]:
    is_server = config.scenario == "server"
    return {
        **dataclasses.asdict(cell),
        "metrics": cell_metrics(runs) | (_server_metrics(runs, config.goal_ms) if is_server else {}),
        "stable": all(is_stable(run.windows) for run in runs),
        "windows": [run.windows for run in runs],
        "unserved": sum(run.unserved for run in runs),
        "time_split": time_split(runs),
        "latency_histogram": histogram([run.latency_s for run in runs]),
    }


def _doubts(
    config: BenchConfig, cells: Sequence[dict[str, Any]], parity: dict[str, Any], *, has_bundle: bool
) -> list[str]:
    """Return why the numbers cannot be trusted, each with what to change."""
    reasons = []
    if not parity["passed"]:
        reasons.append(f"parity was not checked ({'omit --no-verify' if has_bundle else 'pass the served BUNDLE'})")
    if unstable := sum(not cell["stable"] for cell in cells):
        where = f"in {unstable} of {len(cells)} cells " if len(cells) > 1 else ""
        remedy = f"stop other programs, or measure longer with --duration {min(3 * (config.duration or 5), 600):g}"
        remedy += ", or lower --rate" * (config.scenario == "server")
        reasons.append(f"unstable: {where}the last three windows differ by more than 10 % from their mean ({remedy})")
    lost = {
        "had no answer when the run was cancelled": sum(cell["unserved"] for cell in cells),
        "were refused": sum(cell["metrics"]["refused"]["value"] for cell in cells if "refused" in cell["metrics"]),
    }
    reasons += [f"overloaded: {count} requests {what} (lower --rate)" for what, count in lost.items() if count]
    return reasons


def _value(number: float | None, unit: str, per_process: Sequence[float] = (), note: str = _UNSEEN) -> Metric:
    metric: Metric = {"unit": unit, "value": number}
    if per_process:
        metric["per_process"] = list(per_process)
    return metric if number is not None else metric | {"note": note}


def distribution(samples: Sequence[Sequence[float]]) -> Metric:
    pooled = np.concatenate([np.asarray(values, np.float64) for values in samples]) * 1e3
    names = ("avg", "min", "max", "std", *(f"p{percent}" for percent in PERCENTILES))
    if not pooled.size:
        return {"unit": "ms", **dict.fromkeys(names), "count": 0, "per_process": [], "note": "no samples"}
    numbers = pooled.mean(), pooled.min(), pooled.max(), pooled.std(), *np.percentile(pooled, PERCENTILES)
    per_process = [float(np.median(values)) * 1e3 for values in samples if len(values)]
    metric: Metric = {"unit": "ms", **dict(zip(names, map(float, numbers), strict=True)), "count": pooled.size}
    if pooled.size < P99_SAMPLES:
        metric |= {"p99": None, "note": f"p99 needs {P99_SAMPLES:,} samples, there are {pooled.size:,}"}
    return metric | {"per_process": per_process}


def cell_metrics(runs: Sequence[Samples]) -> dict[str, Metric]:
    sequences, source_tokens = sum(run.sequences for run in runs), sum(run.source_tokens for run in runs)
    length = source_tokens / sequences if source_tokens else None
    return {
        "time_to_first_token": distribution([run.first_token_s for run in runs]),
        "inter_token_latency": distribution([run.per_token_s for run in runs]),
        "request_latency": distribution([run.latency_s for run in runs]),
        "output_token_throughput": _rate([run.tokens for run in runs], runs, "tokens/sec"),
        "request_throughput": _rate([run.sequences for run in runs], runs, "requests/sec"),
        "encode_time": distribution([run.encode_s for run in runs]),
        "step_time": distribution([run.step_s for run in runs]),
        "input_sequence_length": _value(length, "tokens"),
        "output_sequence_length": _value(sum(run.tokens for run in runs) / sequences, "tokens"),
        "request_count": _value(sequences, "requests"),
        "benchmark_duration": _value(sum(run.elapsed_s for run in runs), "sec"),
    }


def _rate(counts: Sequence[int], runs: Sequence[Samples], unit: str) -> Metric:
    each = [count / run.elapsed_s for count, run in zip(counts, runs, strict=True)]
    return _value(sum(counts) / sum(run.elapsed_s for run in runs), unit, each)


def _server_metrics(runs: Sequence[Samples], goal_ms: float | None) -> dict[str, Metric]:
    shares = [run.slot_occupancy for run in runs if run.slot_occupancy is not None]
    queue = distribution([run.queue_s for run in runs])
    goodput = _value(None, "requests/sec", note="needs a goal; set --goal-ms")
    if goal_ms is not None:
        good = [sum(1e3 * latency <= goal_ms for latency in run.latency_s) for run in runs]
        goodput = _rate(good, runs, "requests/sec")
    return {
        "goodput": goodput,
        "slot_occupancy": _value(statistics.fmean(shares) if shares else None, "ratio", shares),
        "queue_time": queue if queue["count"] else queue | {"note": _UNSEEN},
        "refused": _value(sum(run.refused for run in runs), "requests"),
    }


def _process_metrics(results: Sequence[dict[str, Any]]) -> dict[str, Metric]:
    metrics = {}
    names = {"load_time": "load_s", "load_to_first_token": "load_to_first_token_s", "peak_memory": "peak_memory_bytes"}
    for metric, name in names.items():
        unit, scale = ("ms", 1e3) if name.endswith("_s") else ("MB", 1e-6)
        values = [process[name] * scale for process in results if name in process]
        metrics[metric] = _value(statistics.median(values) if values else None, unit, values)
    return metrics


def is_stable(windows: Sequence[float]) -> bool:
    last = np.asarray(windows[-STABLE_WINDOWS:], np.float64)
    return len(last) == STABLE_WINDOWS and bool((np.abs(last - last.mean()) <= STABLE_WITHIN * last.mean()).all())


def time_split(runs: Sequence[Samples]) -> dict[str, float]:
    """Return the shares of encoder, steps, reordering and rest; empty if unknown."""
    if not (busy := sum(run.busy_s for run in runs)):
        return {}
    shares = {
        "encode": sum(sum(run.encode_s) for run in runs) / busy,
        "step": sum(run.stepping_s for run in runs) / busy,
        "reorder": sum(run.reordering_s for run in runs) / busy,
    }
    return {**shares, "rest": 1 - sum(shares.values())}


def histogram(samples: Sequence[Sequence[float]]) -> dict[str, list[float]]:
    """Count latencies in equal bins; the last one has no upper bound."""
    pooled = np.concatenate([np.asarray(values, np.float64) for values in samples]) * 1e3
    if not pooled.size:
        return {"edges_ms": [], "counts": []}
    low = float(pooled.min())
    high = max(float(np.percentile(pooled, 99.5)), 1.01 * low + 1e-6)  # equal latencies still need a width
    bins = min(_BINS, max(5, pooled.size // 5))
    counts, edges = np.histogram(np.minimum(pooled, high), bins=bins, range=(low, high))
    return {"edges_ms": edges.tolist(), "counts": counts.tolist()}
