"""Format a report as terminal lines, or as an HTML page (extra `bench`)."""

from __future__ import annotations

import base64
import io
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
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<title>{{ headline }}</title>
<style>
body { margin: 0 auto; padding: 1em; max-width: 1200px; font: 14px/1.4 system-ui, sans-serif; }
pre { padding: 1em; background: #f6f7f9; overflow-x: auto; }
img { width: 100%; }
.invalid { color: #b42318; font-weight: 600; }
</style>
</head>
<body>
<h1>{{ result.bundle.name }}</h1>
<p{% if not result.validity.valid %} class="invalid"{% endif %}>{{ verdict }}</p>
<pre>{{ table }}</pre>
<img alt="Latencies, and stability or throughput" src="{{ plots }}"/>
<p>Measured {{ result.environment.date }}; bundle sha256 {{ result.bundle.sha256 or "unknown" }}.</p>
</body>
</html>
"""


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


def check_page() -> None:
    """Import the libraries of the page, so that a missing extra fails early."""
    import jinja2  # noqa: F401
    import matplotlib.figure  # noqa: F401


def render(result: dict[str, Any]) -> str:
    """Return a report as an HTML page without external files or scripts."""
    from jinja2 import Environment

    template = Environment(autoescape=True, trim_blocks=True).from_string(_PAGE)
    texts = {"headline": headline(result), "verdict": verdict(result), "table": "\n".join(lines(result))}
    return template.render(result=result, plots=_plots(result), **texts)


def _plots(result: dict[str, Any]) -> str:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    best = result["cells"][result["best_cell"]]
    bars, latency = best["latency_histogram"], best["metrics"]["request_latency"]
    left.set(title=f"Latency of {latency['count']:,} requests", xlabel="milliseconds, end to end", ylabel="count")
    if bars["counts"]:
        left.stairs(bars["counts"], bars["edges_ms"], fill=True)
    for name in _NUMBERS:
        if latency[name] is not None:
            left.axvline(latency[name], color="black", linestyle=":")
            left.annotate(name, (latency[name], 0.95), xycoords=("data", "axes fraction"), rotation=90, va="top")
    if result["scenario"] == "sweep":
        right.set(title="Throughput by batch size", xlabel="batch size", ylabel="output tokens a second")
        speeds: dict[str, dict[int, float]] = {}
        for cell in result["cells"]:
            label = f"source {cell['source_length'] or 'texts'}, target {cell['target_length'] or 'all'}"
            speed = cell["metrics"]["output_token_throughput"]["value"]
            speeds.setdefault(label, {})[cell["batch_size"]] = speed
        for label, by_size in speeds.items():
            right.plot(sorted(by_size), [by_size[size] for size in sorted(by_size)], marker="o", label=label)
    else:
        unit = "median latency, s" if result["scenario"] == "server" else "tokens a second"
        right.set(title="Stability", xlabel="window", ylabel=unit)
        for process, windows in enumerate(best["windows"], 1):
            right.plot(range(1, len(windows) + 1), windows, marker="o", label=f"process {process}")
    right.set_ylim(bottom=0)
    right.legend()
    image = io.BytesIO()
    figure.savefig(image, format="svg", metadata={"Date": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(image.getvalue()).decode()}"
