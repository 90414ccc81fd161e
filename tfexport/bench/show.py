"""Format a report as lines of the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from tfexport.bench._report import P99_SAMPLES

WIDTH = 90
MISSING = "–"
_LABEL = 22
_NUMBERS = ("p50", "p90", "p95", "p99")
_TIMES = {
    "time_to_first_token": "time to first token",
    "inter_token_latency": "per output token",
    "request_latency": "end to end",
    "encode_time": "encoder",
    "step_time": "decoder step",
}
_SPLIT = {"encode": "encoder", "step": "decoder steps", "reorder": "moving rows", "rest": "rest"}


def lines(result: dict[str, Any]) -> list[str]:
    """Return a report as lines of at most 90 columns."""
    table = _sweep(result) if result["scenario"] == "sweep" else _times(result["cells"][0]["metrics"])
    head = [*_wrapped(headline(result)), _effort(result)]
    return [*head, "", *table, "", *_facts(result), *_wrapped(verdict(result))]


def grid(rows: Sequence[Sequence[str]]) -> list[str]:
    """Align columns: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows]
    return ["  ".join(row).rstrip() for row in aligned]


def number(value: float | None) -> str:
    """Format a number with about three digits: 0.0123, 1.23, 123, 12,300."""
    if value is None:
        return MISSING
    for limit, digits in ((100, 0), (10, 1), (1, 2), (0.1, 3)):
        if abs(value) >= limit:
            return f"{value:,.{digits}f}"
    return f"{value:.4f}" if value else "0"


def headline(result: dict[str, Any]) -> str:
    """Describe what was measured: bundle, scenario and sizes."""
    settings, bundle = result["settings"], result["bundle"]
    sizes = {
        "slots" if result["scenario"] == "server" else "batch": settings["batch_size"],
        "source": settings["source_length"],
        "target": settings["target_length"],
    }
    parts = [
        bundle["name"],
        bundle["precision"],
        settings["url"],
        settings["backend"] + (f" {settings['engine']}" if settings["engine"] else ""),
        settings["device"] if settings["device"] != "cpu" else None,
        f"{settings['variant']} variant" if settings["variant"] else None,
        result["scenario"] + (f" at {settings['rate']:.4g} requests/s" if settings["rate"] else ""),
        *(f"{name} {', '.join(map(str, values))}" for name, values in sizes.items() if values),
        f"{settings['input']['texts']:,} texts" if settings["input"] else None,
        "greedy" if settings["num_beams"] == 1 else f"beam {settings['num_beams']}",
    ]
    return " · ".join(filter(None, parts))


def verdict(result: dict[str, Any]) -> str:
    """Return whether the numbers are valid, and if not, why."""
    reasons = result["validity"]["reasons"]
    return f"INVALID: {'; '.join(reasons)}" if reasons else f"VALID: stable, parity {result['parity']['source']}"


def _effort(result: dict[str, Any]) -> str:
    settings = result["settings"]
    processes = "1 fresh process" if settings["processes"] == 1 else f"{settings['processes']} fresh processes"
    cells = f", {len(result['cells'])} combinations" if len(result["cells"]) > 1 else ""
    return f"{processes}, {settings['duration']:g} s each{cells}"


def _times(metrics: dict[str, Any]) -> list[str]:
    measured = {label: metrics[name] for name, label in _TIMES.items() if metrics[name]["count"]}
    rows = [["milliseconds", *_NUMBERS, "samples", "p50 of processes"]]
    for label, metric in measured.items():
        numbers = [number(metric[column]) for column in _NUMBERS]
        rows.append([label, *numbers, f"{metric['count']:,}", _spread(metric["per_process"])])
    too_few = any(metric["p99"] is None for metric in measured.values())
    return [*grid(rows), *([f"{MISSING} p99 needs {P99_SAMPLES:,} samples"] if too_few else [])]


def _sweep(result: dict[str, Any]) -> list[str]:
    rows = [["source", "target", "batch", "tokens/s", "texts/s", "step p50", "text p50", "p90 ms", ""]]
    for index, cell in enumerate(result["cells"]):
        metrics = cell["metrics"]
        numbers = [
            metrics["output_token_throughput"]["value"],
            metrics["request_throughput"]["value"],
            metrics["step_time"]["p50"],
            metrics["request_latency"]["p50"],
            metrics["request_latency"]["p90"],
        ]
        sizes = [cell["source_length"] or "texts", cell["target_length"] or "all", cell["batch_size"]]
        note = ("best" if index == result["best_cell"] else "") + ("" if cell["stable"] else " unstable")
        rows.append([*map(str, sizes), *map(number, numbers), note])
    return grid(rows)


def _facts(result: dict[str, Any]) -> list[str]:
    metrics, cell, about = result["metrics"], result["cells"][result["best_cell"]], result["environment"]
    facts = {
        "output tokens": f"{_rate(metrics['output_token_throughput'])} a second",
        "texts": f"{_rate(metrics['request_throughput'])} a second",
        **_serving(result),
    }
    # A server can be idle, and does not record the time of moving rows.
    names = {**_SPLIT, "rest": "idle"} if result["scenario"] == "server" else _SPLIT
    shares = {name: cell["time_split"].get(key, 0) for key, name in names.items()}
    if split := ", ".join(f"{name} {_percent(share)}" for name, share in shares.items() if share >= 0.0005):
        facts["where the time goes"] = split
    if metrics["load_time"]["value"] is not None:
        load, first = _rate(metrics["load_time"]), _rate(metrics["load_to_first_token"])
        facts["peak memory"] = f"{number(metrics['peak_memory']['value'])} MB"
        facts["load"] = f"{load} ms, first token after {first} ms"
    facts["machine"] = f"{about['cpu']}, {about['threads']} of {about['cores']} cores, {about['system']}"
    facts["instruction sets"] = f"{' '.join(about['instruction_sets'])}; 8-bit products {about['int8_products']}"
    facts["versions"] = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    return [line for label, text in facts.items() for line in _wrapped(text, label)]


def _serving(result: dict[str, Any]) -> dict[str, str]:
    if result["scenario"] != "server":
        return {}
    settings, metrics, facts = result["settings"], result["metrics"], {}
    if settings["goal_ms"]:
        goodput = number(metrics["goodput"]["value"])
        facts["goodput"] = f"{goodput} requests a second answered within {settings['goal_ms']:g} ms"
    if (share := metrics["slot_occupancy"]["value"]) is not None:
        facts["slots"] = f"{_percent(share)} in use by a step"
    if (queue := metrics["queue_time"])["count"]:
        facts["queue"] = f"{number(queue['p50'])} ms, p90 {number(queue['p90'])}, p95 {number(queue['p95'])}"
    return facts | {"refused": f"{metrics['refused']['value']:,} requests"}


def _percent(share: float | None) -> str:
    return MISSING if share is None else f"{100 * share:.0f} %" if share >= 0.095 else f"{100 * share:.1f} %"


def _spread(per_process: Sequence[float]) -> str:
    return f"{number(min(per_process))} … {number(max(per_process))}" if len(per_process) > 1 else ""


def _rate(metric: dict[str, Any]) -> str:
    between = _spread(metric.get("per_process", []))
    return number(metric["value"]) + (f" ({between})" if between else "")


def _wrapped(text: str, label: str = "") -> list[str]:
    start = label.ljust(_LABEL) if label else ""
    return textwrap.wrap(text, WIDTH, initial_indent=start, subsequent_indent=" " * len(start))
