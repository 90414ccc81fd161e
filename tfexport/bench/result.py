"""The report of a measurement as JSON values, schema tfexport.bench/1."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from tfexport.bench import summary
from tfexport.bench.config import BenchConfig, Cell
from tfexport.bench.samples import Samples

SCHEMA = "tfexport.bench/1"


def cell_result(config: BenchConfig, cell: Cell, runs: Sequence[Samples]) -> dict[str, Any]:
    """Summarise one cell.

    Args:
        config: resolved.
        cell: its sizes.
        runs: its samples, of each process.
    """
    is_server = config.scenario == "server"
    return {
        "batch_size": cell.batch_size,
        "source_length": cell.source_length,
        "target_length": cell.target_length,
        "metrics": summary.cell_metrics(runs) | (summary.server_metrics(runs, config.goal_ms) if is_server else {}),
        "stable": all(summary.is_stable(run.windows) for run in runs),
        "windows": [run.windows.tolist() for run in runs],
        "unserved": sum(run.unserved for run in runs),
        "time_split": summary.time_split(runs),
        "step_time_by_position_ms": summary.step_time_by_position(runs),
        "latency_histogram": summary.histogram([run.latency_s for run in runs]),
        **({"in_flight": summary.in_flight(runs[0])} if is_server else {}),
    }


def build_result(
    config: BenchConfig,
    found: Sequence[dict[str, Any]],
    about: dict[str, Any],
    parity: dict[str, Any],
    trials: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """Put a report together.

    Args:
        config: resolved.
        found: what each process found, see `tfexport.bench.worker.measure`.
        about: `bundle`, `input` and `environment` of the report.
        parity: likewise.
        trials: of the search for the rate, see `tfexport.bench.search.Trial`.

    Returns:
        The report. Its `metrics` are those of the cell with the highest throughput of tokens, which is the only one
        except in a sweep, and those of the processes.
    """
    cells = [
        cell_result(config, cell, [Samples.from_dict(process["cells"][index]) for process in found])
        for index, cell in enumerate(config.cells)
    ]
    process = process_metrics(found)
    for cell in cells:
        cell["metrics"]["memory_bandwidth_share"] = _bandwidth_share(cell["metrics"], process)
    best = max(range(len(cells)), key=lambda index: cells[index]["metrics"]["output_token_throughput"]["value"])
    reasons = _doubts(config, cells, parity)
    return {
        "schema": SCHEMA,
        "bundle": about["bundle"],
        "scenario": config.scenario,
        "settings": {**settings(config), "backend": found[0]["backend"], "input": about["input"]},
        "parity": parity,
        "environment": about["environment"],
        "trials": list(trials),
        "validity": {"valid": not reasons, "reasons": reasons},
        "best_cell": best,
        "metrics": {**cells[best]["metrics"], **process},
        "cells": cells,
    }


def process_metrics(found: Sequence[dict[str, Any]]) -> dict[str, summary.Metric]:
    """Return the metrics that a process has whatever it decodes."""

    def median(name: str, unit: str, scale: float) -> summary.Metric:
        if name not in found[0]:
            return summary.value(None, unit, note="not seen from outside the server")
        values = [process[name] * scale for process in found]
        return summary.value(statistics.median(values), unit, values)

    weight_bytes = found[0].get("step_weight_bytes")
    note = "" if weight_bytes else "known for canonical models in ONNX Runtime on the CPU only"
    return {
        "load_time": median("load_s", "ms", 1e3),
        "load_to_first_token": median("load_to_first_token_s", "ms", 1e3),
        "peak_memory": median("peak_memory_bytes", "MB", 1e-6),
        "memory_bandwidth": median("memory_bandwidth", "GB/s", 1e-9),
        "step_weight_bytes": summary.value(weight_bytes, "bytes", note=note),
    }


def _bandwidth_share(metrics: dict[str, summary.Metric], process: dict[str, summary.Metric]) -> summary.Metric:
    weight_bytes, step_ms = process["step_weight_bytes"]["value"], metrics["step_time"]["p50"]
    if not weight_bytes or not step_ms:
        return summary.value(None, "ratio", note="needs the bytes of weights and the time of a step")
    return summary.value(weight_bytes / step_ms * 1e-6 / process["memory_bandwidth"]["value"], "ratio")


def settings(config: BenchConfig) -> dict[str, Any]:
    """Return the settings of a report; where a token or keys lie is nobody's business."""
    found = config.to_dict()
    del found["scenario"], found["token_file"], found["trusted_keys"]
    return {name: list(item) if isinstance(item, tuple) else item for name, item in found.items()}


def _doubts(config: BenchConfig, cells: Sequence[dict[str, Any]], parity: dict[str, Any]) -> list[str]:
    """Say why the numbers are to be read with care, if they are."""
    reasons = []
    if not parity["passed"]:
        reasons.append("parity was not verified")
    unstable = sum(not cell["stable"] for cell in cells)
    if unstable:
        where = f"in {unstable} of {len(cells)} cells " if len(cells) > 1 else ""
        reasons.append(f"unstable: {where}the last three windows differ by more than 10 % from their mean")
    unserved = sum(cell["unserved"] for cell in cells)
    if unserved:
        reasons.append(f"overloaded: {unserved} requests had not been answered when the run was given up")
    if refused := sum(cell["metrics"]["refused"]["value"] for cell in cells if "refused" in cell["metrics"]):
        reasons.append(f"overloaded: {refused} requests were refused")
    p99 = cells[0]["metrics"]["request_latency"]["p99"]
    if config.goal_p99 is not None and p99 is not None and p99 > config.goal_p99:
        reasons.append(f"p99 is {p99:.0f} ms, above the bound of {config.goal_p99:g}; lower the rate")
    return reasons
