"""A measurement as lines for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from tfexport.bench import words
from tfexport.bench.summary import P99_SAMPLES

WIDTH = 90
_LABEL = 22
_NUMBERS = ("p50", "p90", "p95", "p99")


def lines(result: dict[str, Any]) -> list[str]:
    """Lay a report out in at most 90 columns.

    Args:
        result: the report, see `tfexport.bench.result.build_result`.
    """
    found = [*_wrapped(" · ".join(words.headline(result))), words.effort(result), ""]
    found += _sweep(result) if result["scenario"] == "sweep" else _times(result["cells"][0]["metrics"])
    return [*found, "", *_facts(result), *_wrapped(words.verdict(result))]


def grid(rows: Sequence[Sequence[str]]) -> list[str]:
    """Align columns: the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        ).rstrip()
        for row in rows
    ]


def _times(metrics: dict[str, Any]) -> list[str]:
    rows = [["milliseconds", *_NUMBERS, "samples", "p50 of processes"]]
    for name, label in words.TIMES.items():
        metric = metrics[name]
        if not metric["count"]:  # not seen from outside a server
            continue
        numbers = [words.number(metric[column]) for column in _NUMBERS]
        rows.append([label, *numbers, f"{metric['count']:,}", words.spread(metric["per_process"])])
    too_few = any(metrics[name]["p99"] is None for name in words.TIMES if metrics[name]["count"])
    return [*grid(rows), *([f"{words.MISSING} p99 needs {P99_SAMPLES:,} samples"] if too_few else [])]


def _sweep(result: dict[str, Any]) -> list[str]:
    rows = [["source", "target", "batch", "tokens/s", "texts/s", "step p50", "text p50", "p90 ms", "bandwidth", ""]]
    for index, cell in enumerate(result["cells"]):
        metrics = cell["metrics"]
        rows.append(
            [
                str(cell["source_length"] or "texts"),
                str(cell["target_length"] or "all"),
                str(cell["batch_size"]),
                words.number(metrics["output_token_throughput"]["value"]),
                words.number(metrics["request_throughput"]["value"]),
                words.number(metrics["step_time"]["p50"]),
                words.number(metrics["request_latency"]["p50"]),
                words.number(metrics["request_latency"]["p90"]),
                words.percent(metrics["memory_bandwidth_share"]["value"]),
                ("best" if index == result["best_cell"] else "") + ("" if cell["stable"] else " unstable"),
            ]
        )
    return grid(rows)


def _facts(result: dict[str, Any]) -> list[str]:
    metrics, cell = result["metrics"], result["cells"][result["best_cell"]]
    facts = {
        "output tokens": f"{_rate(metrics['output_token_throughput'])} a second",
        "texts": f"{_rate(metrics['request_throughput'])} a second",
        **words.serving(result),
    }
    if split := words.split(result, cell["time_split"]):
        facts["where the time goes"] = ", ".join(
            f"{name} {words.percent(share)}" for name, share in split.items() if share >= 0.0005
        )
    if metrics["load_time"]["value"] is not None:
        load, first = _rate(metrics["load_time"]), _rate(metrics["load_to_first_token"])
        facts |= {
            "weights": words.weights(metrics),
            "peak memory": f"{words.number(metrics['peak_memory']['value'])} MB",
            "load": f"{load} ms, first token after {first} ms",
        }
    facts |= {"machine": words.machine(result["environment"]), "versions": words.versions(result["environment"])}
    return [line for label, text in facts.items() for line in _wrapped(text, label)]


def _rate(metric: dict[str, Any]) -> str:
    between = words.spread(metric.get("per_process", []))
    return words.number(metric["value"]) + (f" ({between})" if between else "")


def _wrapped(text: str, label: str = "") -> list[str]:
    start = label.ljust(_LABEL) if label else ""
    return textwrap.wrap(text, WIDTH, initial_indent=start, subsequent_indent=" " * len(start))
