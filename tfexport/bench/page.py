"""A measurement as one page of HTML that holds all it needs: no script, no link, no font from elsewhere."""

from __future__ import annotations

from html import escape
from typing import Any

from tfexport.bench import plot, words

_STYLE = """
:root { color-scheme: light dark; --page: #fff; --card: #f6f7f9; --ink: #1a1d21; --soft: #5c6570; --line: #dde1e6;
  --good: #1a7f4b; --bad: #b42318; --c0: #2f6fd6; --c1: #e08a1e; --c2: #2a9d74; --c3: #8b98a8; --c4: #9a5bc8;
  --c5: #c4485f; }
@media (prefers-color-scheme: dark) { :root { --page: #14171b; --card: #1d2126; --ink: #e8eaed; --soft: #9aa4b0;
  --line: #343a42; --good: #4cc38a; --bad: #ff8a7a; --c0: #6ea3f5; --c1: #f0ab55; --c2: #57c79c; --c3: #7d8a9a;
  --c4: #bd8ce6; --c5: #e57f93; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 14px 24px; max-width: 1280px; background: var(--page); color: var(--ink);
  font: 14px/1.4 system-ui, sans-serif; }
h1 { font-size: 20px; margin: 0; } h1 small { font-size: 14px; font-weight: 400; color: var(--soft); }
 h2 { font-size: 14px; margin: 0 0 4px; } p { margin: 2px 0; }
.good { color: var(--good); } .bad { color: var(--bad); font-weight: 600; }
.tiles { display: grid; grid-template-columns: repeat(6, 1fr); gap: 10px; margin: 8px 0 10px; }
.plots { display: grid; grid-template-columns: 1fr 1fr; gap: 10px; }
.tile, .plot, .details { background: var(--card); border-radius: 6px; padding: 8px 14px; min-width: 0; }
.tile b { display: block; font-size: 22px; line-height: 1.2; font-variant-numeric: tabular-nums; }
.tile small { color: var(--soft); }
.details { margin-top: 10px; display: grid; grid-template-columns: 1fr 1fr; gap: 4px 28px; }
.wide { grid-column: 1 / -1; overflow-x: auto; }
.wide + dl { grid-column: 1 / -1; grid-template-columns: max-content 1fr max-content 1fr; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 2px 0 2px 12px; border-bottom: 1px solid var(--line); font-weight: 400; }
th { color: var(--soft); } th:first-child, td:first-child { text-align: left; padding-left: 0; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 14px; margin: 0; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
svg { display: block; width: 100%; height: auto; font: 11px system-ui, sans-serif; }
.grid { stroke: var(--line); } .axis { stroke: var(--soft); } .mark { stroke: var(--ink); stroke-dasharray: 3 3; }
.tick, .name { fill: var(--soft); } .label { fill: var(--ink); } .inside { fill: var(--page); font-weight: 600; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; }
.head { display: flex; flex-wrap: wrap; justify-content: space-between; align-items: baseline; gap: 0 14px; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 14px; color: var(--soft); font-size: 12px; }
.legend i { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 5px; }
@media screen and (max-width: 800px) { .tiles { grid-template-columns: repeat(2, 1fr); }
  .plots, .details { grid-template-columns: 1fr; } }
@media print { @page { margin: 10mm; } body { padding: 0; font-size: 11px; }
  .tile, .plot, .details { break-inside: avoid; border: 1px solid var(--line); } }
"""
_COLOURS = "".join(
    f".c{i} {{ fill: var(--c{i}); background: var(--c{i}); }} .s{i} {{ stroke: var(--c{i}); }}\n"
    for i in range(plot.COLOURS)
)


def render(result: dict[str, Any]) -> str:
    """Write a report as a page.

    Args:
        result: the report, see `tfexport.bench.result.build_result`.
    """
    best = result["cells"][result["best_cell"]]
    is_sweep = result["scenario"] == "sweep"
    where = f", {_lengths(best)}, batch {best['batch_size']}" if is_sweep else ""
    kind = "requests" if best["batch_size"] == 1 or result["scenario"] == "server" else "batches"
    over = _throughput_by_batch(result) if is_sweep else _over_time(result, best)
    steps = _in_flight(best) if result["scenario"] == "server" else _steps(best, where)
    plots = [_latencies(best, kind, where), steps, over, _split(result, best)]
    title = f"{result['bundle']['name']}: {result['scenario']}"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<title>{escape(title)}</title>
<style>{_STYLE}{_COLOURS}</style>
</head>
<body>
<header>
<h1>{escape(result["bundle"]["name"])} <small>{escape(" · ".join(words.headline(result)[1:]))}</small></h1>
<p class="{"good" if result["validity"]["valid"] else "bad"}">{escape(words.verdict(result))}</p>
</header>
<section class="tiles">{_tiles(result)}</section>
<section class="plots">{"".join(plots)}</section>
<section class="details">{_table(result)}{_facts(result)}</section>
</body>
</html>
"""


def _tiles(result: dict[str, Any]) -> str:
    metrics = result["metrics"]
    tiles = [
        ("output_token_throughput", "value", "output tokens a second"),
        ("time_to_first_token", "p50", "ms to the first token, p50"),
        ("inter_token_latency", "p50", "ms a further token, p50"),
        ("request_latency", "p90", "ms end to end, p90"),
        ("peak_memory", "value", "MB peak memory"),
    ]
    shown = [(words.number(metrics[name][column]), text) for name, column, text in tiles]
    if result["scenario"] == "server":
        shown.append((words.percent(metrics["slot_occupancy"]["value"]), "of the slots in use by a step"))
    else:
        shown.append((words.percent(metrics["memory_bandwidth_share"]["value"]), "of the memory bandwidth"))
    return "".join(f'<div class="tile"><b>{number}</b><small>{text}</small></div>' for number, text in shown)


def _plot(title: str, picture: str, legend: list[str] | None = None) -> str:
    entries = "".join(
        f'<span><i class="c{index % plot.COLOURS}"></i>{escape(label)}</span>'
        for index, label in enumerate(legend or [])
    )
    key = f'<div class="legend">{entries}</div>' if entries else ""
    return f'<div class="plot"><div class="head"><h2>{escape(title)}</h2>{key}</div>{picture}</div>'


def _latencies(best: dict[str, Any], kind: str, where: str) -> str:
    latency, bars = best["metrics"]["request_latency"], best["latency_histogram"]
    marks = {name: latency[name] for name in ("p50", "p90", "p95", "p99") if latency[name] is not None}
    title = f"Latency of {latency['count']:,} {kind}{where}"
    return _plot(title, plot.histogram(bars["edges_ms"], bars["counts"], marks))


def _steps(best: dict[str, Any], where: str) -> str:
    times = best["step_time_by_position_ms"]
    series = plot.Series("position", range(len(times)), times)
    title = "Step time over position"
    return _plot(f"{title}{where}", plot.lines([series], title, "position in the target", "ms, median"))


def _in_flight(best: dict[str, Any]) -> str:
    over, labels = best["in_flight"], {"waiting": "without a token", "running": "being answered"}
    series = [plot.Series(label, over["seconds"], over[name]) for name, label in labels.items()]
    title = "Requests under way"
    return _plot(title, plot.lines(series, title, "seconds", "requests"), list(labels.values()))


def _over_time(result: dict[str, Any], best: dict[str, Any]) -> str:
    what = "median latency, ms" if result["scenario"] == "server" else "tokens a second"
    scale = 1e3 if result["scenario"] == "server" else 1
    series = [
        plot.Series(f"process {number}", range(1, len(windows) + 1), [scale * value for value in windows])
        for number, windows in enumerate(best["windows"], 1)
    ]
    legend = [one.label for one in series] if 1 < len(series) <= plot.COLOURS else None
    return _plot("Stability", plot.lines(series, "Stability", "window", what, ordinal=True), legend)


def _throughput_by_batch(result: dict[str, Any]) -> str:
    groups: dict[str, list[tuple[float, float]]] = {}
    for cell in result["cells"]:
        point = cell["batch_size"], cell["metrics"]["output_token_throughput"]["value"]
        groups.setdefault(_lengths(cell), []).append(point)
    series = [plot.Series(label, *zip(*sorted(points), strict=True)) for label, points in groups.items()]
    title = "Throughput against batch"
    picture = plot.lines(series, title, "batch size", "output tokens a second", ordinal=True)
    return _plot(title, picture, [one.label for one in series] if len(series) > 1 else None)


def _split(result: dict[str, Any], best: dict[str, Any]) -> str:
    same = [cell for cell in result["cells"] if _lengths(cell) == _lengths(best)]
    if len(same) == 1:
        picture = plot.bars(words.split(result, best["time_split"]))
        return _plot("Where the time goes", picture)
    rows = {f"batch {cell['batch_size']}": [cell["time_split"][key] for key in words.SPLIT] for cell in same}
    names = list(words.SPLIT.values())
    return _plot(f"Where the time goes, {_lengths(best)}", plot.stacks(rows, names), names)


def _lengths(cell: dict[str, Any]) -> str:
    source = "texts" if cell["source_length"] is None else f"source {cell['source_length']}"
    return source if cell["target_length"] is None else f"{source}, target {cell['target_length']}"


def _table(result: dict[str, Any]) -> str:
    if result["scenario"] == "sweep":
        head = ["sizes", "batch", "tokens/s", "texts/s", "step p50", "p50", "p90", "p95", "bandwidth", "stable"]
        rows = [_sweep_row(cell) for cell in result["cells"]]
        return f'<div class="wide">{_rows(head, rows)}</div>'
    columns = ("p50", "p90", "p95", "p99")
    rows = []
    for name, label in words.TIMES.items():
        metric = result["metrics"][name]
        rows.append([label, *(words.number(metric[column]) for column in columns), f"{metric['count']:,}"])
    return f"<div>{_rows(['milliseconds', *columns, 'samples'], rows)}</div>"


def _sweep_row(cell: dict[str, Any]) -> list[str]:
    metrics = cell["metrics"]
    latency = metrics["request_latency"]
    numbers = (
        metrics["output_token_throughput"]["value"],
        metrics["request_throughput"]["value"],
        metrics["step_time"]["p50"],
        *(latency[column] for column in ("p50", "p90", "p95")),
    )
    share, stable = words.percent(metrics["memory_bandwidth_share"]["value"]), "yes" if cell["stable"] else "no"
    return [_lengths(cell), str(cell["batch_size"]), *map(words.number, numbers), share, stable]


def _rows(head: list[str], rows: list[list[str]]) -> str:
    top = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def _facts(result: dict[str, Any]) -> str:
    metrics, about = result["metrics"], result["environment"]
    load, first = (words.number(metrics[name]["value"]) for name in ("load_time", "load_to_first_token"))
    facts = {
        "measured": f"{about['date'][:16].replace('T', ' ')} UTC, {words.effort(result)}",
        **words.serving(result),
        "load": f"{load} ms, first token after {first} ms",
        "weights": words.weights(metrics),
        "machine": words.machine(about),
        "versions": words.versions(about),
        "bundle": f"sha256 {(result['bundle']['sha256'] or words.MISSING)[:16]}…, parity {result['parity']['source']}",
    }
    entries = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in facts.items())
    return f"<dl>{entries}</dl>"
