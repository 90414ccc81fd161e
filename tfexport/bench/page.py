"""Render a report as one HTML page with plots; needs the extra `bench`."""

from __future__ import annotations

import base64
import io
from importlib.resources import files
from typing import Any

from jinja2 import Environment
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tfexport.bench.table import headline, lines, verdict

_SPLIT = ("encode", "step", "reorder", "rest")


def render(result: dict[str, Any]) -> str:
    """Return a report as a page that needs no other file, no network and no script."""
    template = files("tfexport.bench").joinpath("page.html").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, trim_blocks=True, keep_trailing_newline=True)
    return environment.from_string(template).render(
        result=result,
        headline=headline(result),
        verdict=verdict(result),
        table="\n".join(lines(result)),
        plots=plots(result),
    )


def plots(result: dict[str, Any]) -> str:
    """Draw four plots of a report; return them as a data URL of an SVG image."""
    figure = Figure(figsize=(12, 7), layout="constrained")
    (latencies, over_position), (middle, split) = figure.subplots(2, 2)
    best = result["cells"][result["best_cell"]]
    _latencies(latencies, best)
    (_in_flight if "in_flight" in best else _steps)(over_position, best)
    (_throughput if result["scenario"] == "sweep" else _windows)(middle, result, best)
    _time_split(split, result)
    image = io.BytesIO()
    figure.savefig(image, format="svg", metadata={"Date": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(image.getvalue()).decode()}"


def _latencies(axes: Axes, best: dict[str, Any]) -> None:
    bars, latency = best["latency_histogram"], best["metrics"]["request_latency"]
    axes.set(title=f"Latency of {latency['count']:,} requests", xlabel="milliseconds, end to end", ylabel="count")
    if bars["counts"]:
        axes.stairs(bars["counts"], bars["edges_ms"], fill=True)
    for name in ("p50", "p90", "p95", "p99"):
        if latency[name] is not None:
            axes.axvline(latency[name], color="black", linestyle=":")
            axes.annotate(name, (latency[name], 0.95), xycoords=("data", "axes fraction"), rotation=90, va="top")


def _steps(axes: Axes, best: dict[str, Any]) -> None:
    axes.set(title="Step time by position", xlabel="position in the target", ylabel="ms, median")
    axes.plot(best["step_time_by_position_ms"])
    axes.set_ylim(bottom=0)


def _in_flight(axes: Axes, best: dict[str, Any]) -> None:
    found = best["in_flight"]
    axes.set(title="Requests in flight", xlabel="seconds", ylabel="requests")
    axes.plot(found["seconds"], found["waiting"], label="without a token")
    axes.plot(found["seconds"], found["running"], label="being answered")
    axes.legend()


def _windows(axes: Axes, result: dict[str, Any], best: dict[str, Any]) -> None:
    is_server = result["scenario"] == "server"
    axes.set(title="Stability", xlabel="window", ylabel="median latency, s" if is_server else "tokens a second")
    for number, windows in enumerate(best["windows"], 1):
        axes.plot(range(1, len(windows) + 1), windows, marker="o", label=f"process {number}")
    axes.set_ylim(bottom=0)
    axes.legend()


def _throughput(axes: Axes, result: dict[str, Any], best: dict[str, Any]) -> None:
    groups: dict[str, dict[int, float]] = {}
    for cell in result["cells"]:
        label = f"source {cell['source_length'] or 'texts'}, target {cell['target_length'] or 'all'}"
        speed = cell["metrics"]["output_token_throughput"]["value"]
        groups.setdefault(label, {})[cell["batch_size"]] = speed
    axes.set(title="Throughput by batch size", xlabel="batch size", ylabel="output tokens a second")
    axes.set_xscale("log", base=2)
    for label, speeds in groups.items():
        axes.plot(sorted(speeds), [speeds[size] for size in sorted(speeds)], marker="o", label=label)
    axes.set_ylim(bottom=0)
    axes.legend()


def _time_split(axes: Axes, result: dict[str, Any]) -> None:
    cells = [cell for cell in result["cells"] if cell["time_split"]]
    axes.set(title="Where the time goes", xlabel="share", ylabel="source/target/batch")
    labels = [
        "/".join(str(cell[name] or "–") for name in ("source_length", "target_length", "batch_size")) for cell in cells
    ]
    left = [0.0] * len(cells)
    for name in _SPLIT:
        shares = [max(0.0, cell["time_split"][name]) for cell in cells]
        axes.barh(labels, shares, left=left, label=name)
        left = [start + share for start, share in zip(left, shares, strict=True)]
    if cells:  # next to the bars, which fill the axes
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
