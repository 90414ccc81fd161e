#!/usr/bin/env python
"""Write the tables and the plot of a result of side_by_side.py: NAME.md and NAME.svg next to NAME.json."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from runner import CTRANSLATE2, OURS, REVISION, read_result, table
from timing import geometric_mean, ratio

from tfexport.errors import TfexportError

SCHEMA = "tfexport.side_by_side/1"
PRECISIONS = ("fp32", "int8", "int4")
# Peers that are compared cell by cell, with their names in headings; older results have others.
MAIN_PEERS = {CTRANSLATE2: "CTranslate2", REVISION: "the other revision"}
# In fp32 the same weights should give equal outputs, except for ties.
ALMOST_ALL = 0.9

Record = Mapping[str, Any]


def ratios(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Compare ours in each precision with each peer at its fastest number of threads.

    Returns:
        For each pair `ratio`, the median over rounds of the peer's time over ours in the same round, above 1 if ours is
        faster, with `low` and `high`. Peers without rounds are left out.
    """
    found = []
    for ours in (run for run in runs if run["system"] == OURS):
        for peer in fastest(run for run in runs if run["system"] != OURS and run["seconds"]):
            over_rounds = ratio(peer["seconds"], ours["seconds"])
            found.append(
                {
                    "precision": ours["precision"],
                    "peer": peer["system"],
                    "peer_precision": peer["precision"],
                    "peer_threads": peer["threads"],
                    "ratio": over_rounds.median,
                    "low": over_rounds.low,
                    "high": over_rounds.high,
                }
            )
    return found


def fastest(runs: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the run with the fastest number of threads of each system and precision."""
    best: dict[tuple[str, str], Mapping[str, Any]] = {}
    for run in runs:
        key = run["system"], run["precision"]
        if key not in best or run["median_s"] < best[key]["median_s"]:
            best[key] = run
    return list(best.values())


def pairs(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return every ratio of a result as a flat record: the setting, the ratio, the runs `ours` and `theirs`."""
    found = []
    for cell in result["cells"]:
        runs = {(run["system"], run["precision"], run["threads"]): run for run in cell["runs"]}
        for compared in cell["ratios"]:
            ours = runs[OURS, compared["precision"], None]
            peer = runs[compared["peer"], compared["peer_precision"], compared["peer_threads"]]
            found.append({**cell["setting"], **compared, "ours": ours, "theirs": peer})
    models = list(dict.fromkeys(pair["model"] for pair in found))

    def order(pair: Mapping[str, Any]) -> tuple[int, ...]:
        sizes = (pair["num_beams"], pair["source_length"], pair["batch_size"])
        return (models.index(pair["model"]), PRECISIONS.index(pair["precision"]), *sizes)

    return sorted(found, key=order)


def means(result: Mapping[str, Any], peer: str) -> dict[str, tuple[float, int]]:
    """Return geometric means of the ratios to a peer, with their numbers of cells, by group."""
    groups: dict[str, list[float]] = {}
    for pair in pairs(result):
        if pair["peer"] == peer:
            decoding = _decoding(pair)
            same = pair["precision"] == pair["peer_precision"]
            names = [f"{pair['precision']} {decoding}", *([decoding, "all"] if same else [])]
            if pair["precision"] == "int4" and pair["batch_size"] == 1:
                names.append("int4 at batch 1")
            for name in names:
                groups.setdefault(name, []).append(pair["ratio"])
    return {name: (geometric_mean(values), len(values)) for name, values in groups.items()}


def render(result: Record) -> str:
    """Return a result as Markdown."""
    everything = pairs(result)
    main = {peer: [pair for pair in everything if pair["peer"] == peer] for peer in MAIN_PEERS}
    others = [pair for pair in everything if pair["peer"] not in MAIN_PEERS]
    sections = [
        _head(result),
        *(section for peer, found in main.items() for section in (_ratios(peer, found), _means(result, peer))),
        _below(everything),
        *(_speeds(peer, found) for peer, found in main.items()),
        _others(others),
        _outputs(result),
        _loads(result),
        _not_measured(result),
    ]
    return "\n\n".join(filter(None, sections))


def _decoding(setting: Record) -> str:
    return "greedy" if setting["num_beams"] == 1 else f"beam {setting['num_beams']}"


def _head(result: Record) -> str:
    about = result["environment"]
    by_system = {load["system"]: load["versions"] for load in result["loads"]}
    listed = "; ".join(
        f"{system} on " * (system not in versions)
        + ", ".join(f"{name} {version}" for name, version in versions.items())
        for system, versions in by_system.items()
    )
    rounds = result["options"].get("rounds", "?")
    tokens = " or ".join(map(str, sorted({cell["setting"]["target_length"] for cell in result["cells"]})))
    return (
        f"{about['cpu']}, {about['threads']} of {about['cores']} cores, {about['system']}, {about['date'][:10]}; "
        f"{listed}; revision {result['revision'][:12] or 'unknown'}{'+' * result['revision'].endswith('+')}; "
        f"{rounds} rounds, {tokens} tokens decoded for each source."
    )


def _grid(title: str, text: str, found: Sequence[Record], cell: Callable[[Record], str]) -> str:
    if not found:
        return ""
    sizes = sorted({(pair["source_length"], pair["batch_size"]) for pair in found})
    rows: dict[tuple[str, str, str], dict[tuple[int, int], str]] = {}
    for pair in found:
        row = rows.setdefault((pair["model"], pair["precision"], _decoding(pair)), {})
        row[pair["source_length"], pair["batch_size"]] = cell(pair)
    head = ["model", "precision", "decoding", *(f"source {source}, batch {batch}" for source, batch in sizes)]
    body = [[*name, *(row.get(size, "") for size in sizes)] for name, row in rows.items()]
    return _section(title, text, table(head, body))


def _ratios(peer: str, found: Sequence[Record]) -> str:
    text = "Its time over ours, above 1 if tfexport is faster. int4 is compared with its int8."
    return _grid(f"Ratio to {MAIN_PEERS[peer]}", text, found, lambda pair: _ratio(pair["ratio"]))


def _speeds(peer: str, found: Sequence[Record]) -> str:
    threads = ", which runs with its faster number of threads" * (peer == CTRANSLATE2)
    return _grid(
        "Tokens a second",
        f"tfexport / {MAIN_PEERS[peer]}{threads}.",
        found,
        lambda pair: f"{pair['ours']['tokens_per_second']:,.0f} / {pair['theirs']['tokens_per_second']:,.0f}",
    )


def _ratio(value: float) -> str:
    return f"**{value:.2f}**" if value < 1 else f"{value:.2f}"


def _means(result: Record, peer: str) -> str:
    found = means(result, peer)
    rows = [[name, f"{value:.2f}", str(count)] for name, (value, count) in found.items()]
    title = f"Geometric means over {MAIN_PEERS[peer]}"
    return _section(title, "", table(["cells", "ratio", "number"], rows)) if rows else ""


def _below(found: Sequence[Record]) -> str:
    rows = [
        [
            pair["model"],
            pair["precision"],
            _decoding(pair),
            str(pair["source_length"]),
            str(pair["batch_size"]),
            _peer(pair),
            f"{pair['ratio']:.2f} ({pair['low']:.2f} to {pair['high']:.2f})",
        ]
        for pair in sorted(found, key=lambda pair: float(pair["ratio"]))
        if pair["ratio"] < 1
    ]
    head = ["model", "precision", "decoding", "source", "batch", "slower than", "ratio (lowest to highest round)"]
    if not found:
        return ""
    return _section("Below 1", "" if rows else "No cell.", table(head, rows) if rows else "")


def _peer(pair: Record) -> str:
    threads = f", {counted(pair['peer_threads'])}" if pair["peer"] == CTRANSLATE2 else ""
    return f"{pair['peer']} {pair['peer_precision']}{threads}"


def _others(found: Sequence[Record]) -> str:
    groups: dict[tuple[str, str, str], list[float]] = {}
    for pair in found:
        groups.setdefault((pair["peer"], pair["model"], _decoding(pair)), []).append(pair["ratio"])
    rows = [[*name, f"{min(each):.2f}", f"{max(each):.2f}", str(len(each))] for name, each in groups.items()]
    head = ["system", "model", "decoding", "lowest", "highest", "cells"]
    return _section("Ratio to other systems, fp32", "", table(head, rows)) if rows else ""


def _outputs(result: Record) -> str:
    groups: dict[tuple[str, str, str], list[Record]] = {}
    for cell in result["cells"]:
        for run in fastest(cell["runs"]):
            groups.setdefault((run["system"], run["precision"], cell["setting"]["model"]), []).append(run)
    rows = []
    for (system, precision, model), runs in groups.items():
        equal, prefix = (statistics.fmean(run[key] for run in runs) for key in ("equal", "equal_prefix"))
        mark = " (differs)" if precision == "fp32" and equal < ALMOST_ALL else ""
        rows.append([system, precision, model, f"{100 * equal:.1f} %{mark}", f"{100 * prefix:.1f} %"])
    text = "Compared with tfexport in fp32: equal sequences, and tokens before the first difference; means of cells."
    head = ["system", "precision", "model", "equal sequences", "equal tokens"]
    return _section("Outputs", text, table(head, rows)) if rows else ""


def _loads(result: Record) -> str:
    rows = []
    for load in result["loads"]:
        ms = [f"{1e3 * statistics.median(load[name]):,.0f}" for name in ("import_s", "load_s", "first_call_s")]
        name = " ".join(filter(None, (load["system"], load["precision"], load["optimize_for"])))
        threads = "default" if load["threads"] is None else str(load["threads"])
        rows.append([load["model"], name, threads, *ms, f"{statistics.median(load['peak_bytes']) / 1e6:,.0f}"])
    text = "Medians of fresh processes; the first call decodes greedily at batch 1; peak resident memory after it."
    head = ["model", "system", "threads", "import, ms", "load, ms", "first call, ms", "memory, MB"]
    return _section("Start and memory", text, table(head, rows)) if rows else ""


def _not_measured(result: Record) -> str:
    reasons = {(row["model"], row["reason"]): None for row in result["not_measured"]}
    return _section("Not measured", "", table(["model", "reason"], reasons)) if reasons else ""


def _section(title: str, text: str, content: str) -> str:
    return "\n\n".join(filter(None, (f"### {title}", text, content)))


def counted(threads: int) -> str:
    """Return a number of threads in words."""
    return f"{threads} thread{'s' if threads != 1 else ''}"


def headline(pair: Record) -> str:
    """Return a ratio in words."""
    peer = f"{pair['peer']} {pair['peer_precision']}"
    return f"{pair['precision']} {pair['ratio']:.2f} ({pair['low']:.2f} to {pair['high']:.2f}) × {peer}"


def draw(result: Record, target: Path) -> None:
    """Draw every ratio as a dot with its range over rounds, one row per model, precision and decoding."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import ScalarFormatter

    found = pairs(result)
    rows = list(dict.fromkeys(map(_row, found)))
    batches = sorted({pair["batch_size"] for pair in found})
    sources = sorted({pair["source_length"] for pair in found})
    figure = Figure(figsize=(9, 1.5 + 0.35 * len(rows)), layout="constrained")
    axes = figure.subplots()
    axes.set(title="How many times as fast as other systems", xlabel="their time over ours", xscale="log")
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_formatter(ScalarFormatter())  # few plots span a power of ten
    axes.axvline(1, color="black")
    for index, batch in enumerate(batches):
        for source in sources:
            dots = [pair for pair in found if (pair["batch_size"], pair["source_length"]) == (batch, source)]
            values = [pair["ratio"] for pair in dots]
            axes.errorbar(
                values,
                [rows.index(_row(pair)) + 0.2 * (index - (len(batches) - 1) / 2) for pair in dots],
                xerr=[
                    [value - pair["low"] for value, pair in zip(values, dots, strict=True)],
                    [pair["high"] - value for value, pair in zip(values, dots, strict=True)],
                ],
                fmt="o" if source == sources[0] else "D",
                markerfacecolor=f"C{index}" if source == sources[0] else "white",
                color=f"C{index}",
                label=f"batch {batch}, source {source}",
            )
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.grid(axis="x")
    figure.legend(loc="outside lower center", ncols=3)
    figure.savefig(target)


def _row(pair: Record) -> str:
    return f"{pair['model']} {pair['precision']} {_decoding(pair)}, {pair['peer']}"


@click.command(help=__doc__)
@click.argument("result", type=click.Path(path_type=Path))
def main(result: Path) -> None:
    try:
        document = read_result(result, SCHEMA)
    except TfexportError as error:
        raise click.ClickException(str(error)) from error
    result.with_suffix(".md").write_text(render(document) + "\n", encoding="utf-8")
    click.echo(result.with_suffix(".md"))
    if pairs(document):
        draw(document, result.with_suffix(".svg"))
        click.echo(result.with_suffix(".svg"))


if __name__ == "__main__":
    main()
