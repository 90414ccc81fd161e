"""What a result of benchmarks/serving.py says, as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from comparison.contestants import EQUAL, FP32, INT8, Contestant

_HEAD = """| | threads | equal texts | tokens | requests a second | a CPU second | highest rate | p99 there, s |
| --- | --- | --- | --- | --- | --- | --- | --- |"""


def render(result: Mapping[str, Any]) -> str:
    """Return tables: contestants on each kind of texts, their ratios, and what the engine costs."""
    about = result["environment"]
    parts = [f"{about['cpu']}, {about['date'][:10]}; p99 within {result['effort']['bound_s']:g} s"]
    for name, standings in result["loads"].items():
        parts += ["", f"### {name}", "", _HEAD, *map(_row, standings)]
    parts += ["", "| ratio of | capacity | CPU time | highest rate |", "| --- | --- | --- | --- |", *_ratios(result)]
    parts += ["", "| the engine | measured | limit |", "| --- | --- | --- |"]
    for model, costs in result["costs"].items():
        parts += [f"| {model}: {name} | {value} | {limit} |" for name, value, limit in _costs(costs)]
    return "\n".join(parts)


def _row(standing: Mapping[str, Any]) -> str:
    kept = [trial["p99_s"] for trial in standing["trials"] if trial["rate"] == standing["highest_rate"]]
    cells = [
        str(_who(standing)),
        str(standing["threads"]),
        f"{100 * standing['agreement']['equal']:.0f} %",
        f"{100 * standing['tokens']:.0f} %",
        f"{standing['requests_per_second']:.2f}",
        f"{standing['requests_per_cpu_second']:.2f}",
        f"{standing['highest_rate']:.2f}",
        f"{kept[0]:.2f}" if kept else "–",
    ]
    return f"| {' | '.join(cells)} |"


def _who(standing: Mapping[str, Any]) -> Contestant:
    return Contestant(standing["system"], standing["precision"], standing["policy"])


def _ratios(result: Mapping[str, Any]) -> list[str]:
    pairs = {
        "log-normal": [(FP32[0], other) for other in FP32[1:]] + [INT8],
        "equal": [EQUAL],
    }
    rows = []
    for name, compared in pairs.items():
        found = {_who(standing): standing for standing in result["loads"].get(name, [])}
        for ours, other in compared:
            if ours in found and other in found:
                cells = [
                    _over(found[ours][key], found[other][key])
                    for key in ("requests_per_second", "requests_per_cpu_second", "highest_rate")
                ]
                rows.append(f"| {name}: {ours} over {other} | {' | '.join(cells)} |")
    return rows


def _over(ours: float, other: float) -> str:
    return f"{ours / other:.2f}" if other else "–"


def _costs(costs: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    idle, burst, host = costs["idle"], costs["burst"], costs["host"]
    return [
        ("one idle request, over generate", f"{_median(idle['engine_s']) / _median(idle['generate_s']):.3f}", "1.1"),
        (
            "burst of 64, worst gap over the median step",
            f"{max(burst['gaps_s']) / _median(burst['steps_s']):.1f}",
            "12",
        ),
        ("host work a step, 32 rows of four kinds", f"{1e6 * _median(host['host_s']):.0f} µs", "300 µs"),
    ]


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)
