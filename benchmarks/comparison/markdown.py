"""A result as Markdown: ratios, means, what is below 1, speeds, other systems, outputs, start and memory."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from comparison.result import fastest, means, pairs
from comparison.systems import REVISION, counted, thread_settings

# Peers that are compared cell by cell, with their names in headings.
MAIN_PEERS = {"ctranslate2": "CTranslate2", REVISION: "the other revision"}
# In fp32 the same weights should say the same, but for ties.
ALMOST_ALL = 0.9

Record = Mapping[str, Any]


def render(result: Record) -> str:
    """Write a result as Markdown.

    Args:
        result: document of `comparison.result.Result`.
    """
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


def decoding(setting: Record) -> str:
    """Name how a setting decodes."""
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
    """Return a table with models, precisions and decoding down and sizes across."""
    if not found:
        return ""
    sizes = sorted({(pair["source_length"], pair["batch_size"]) for pair in found})
    rows: dict[tuple[str, str, str], dict[tuple[int, int], str]] = {}
    for pair in found:
        row = rows.setdefault((pair["model"], pair["precision"], decoding(pair)), {})
        row[pair["source_length"], pair["batch_size"]] = cell(pair)
    head = ["model", "precision", "decoding", *(f"source {source}, batch {batch}" for source, batch in sizes)]
    body = [[*name, *(row.get(size, "") for size in sizes)] for name, row in rows.items()]
    return _section(title, text, _table(head, body))


def _ratios(peer: str, found: Sequence[Record]) -> str:
    text = "Its time over ours, above 1 where tfexport is faster. int4 meets its int8, other precisions the same."
    return _grid(f"Ratio to {MAIN_PEERS[peer]}", text, found, lambda pair: _ratio(pair["ratio"]))


def _speeds(peer: str, found: Sequence[Record]) -> str:
    threads = ", which runs with the number of threads that is faster for it" * _has_thread_settings(peer)
    return _grid(
        "Tokens a second",
        f"tfexport / {MAIN_PEERS[peer]}{threads}.",
        found,
        lambda pair: f"{pair['ours']['tokens_per_second']:,.0f} / {pair['theirs']['tokens_per_second']:,.0f}",
    )


def _has_thread_settings(peer: str) -> bool:
    return len(thread_settings(peer, cores=2)) > 1


def _ratio(value: float) -> str:
    return f"**{value:.2f}**" if value < 1 else f"{value:.2f}"


def _means(result: Record, peer: str) -> str:
    found = means(result, peer)
    rows = [[name, f"{value:.2f}", str(count)] for name, (value, count) in found.items()]
    table = _table(["cells", "ratio", "number"], rows)
    return _section(f"Geometric means over {MAIN_PEERS[peer]}", "", table) if rows else ""


def _below(found: Sequence[Record]) -> str:
    rows = [
        [
            pair["model"],
            pair["precision"],
            decoding(pair),
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
    return _section("Below 1", "" if rows else "No cell.", _table(head, rows) if rows else "")


def _peer(pair: Record) -> str:
    threads = f", {counted(pair['peer_threads'])}" if _has_thread_settings(pair["peer"]) else ""
    return f"{pair['peer']} {pair['peer_precision']}{threads}"


def _others(found: Sequence[Record]) -> str:
    groups: dict[tuple[str, str, str], list[float]] = {}
    for pair in found:
        groups.setdefault((pair["peer"], pair["model"], decoding(pair)), []).append(pair["ratio"])
    rows = [[*name, f"{min(each):.2f}", f"{max(each):.2f}", str(len(each))] for name, each in groups.items()]
    head = ["system", "model", "decoding", "lowest", "highest", "cells"]
    return _section("Ratio to other systems, fp32", "", _table(head, rows)) if rows else ""


def _outputs(result: Record) -> str:
    """Say how far outputs agree with those of our fp32 bundle."""
    groups: dict[tuple[str, str, str], list[Record]] = {}
    for cell in result["cells"]:
        for run in fastest(cell["runs"]):
            groups.setdefault((run["system"], run["precision"], cell["setting"]["model"]), []).append(run)
    rows = []
    for (system, precision, model), runs in groups.items():
        equal, prefix = (statistics.fmean(run[key] for run in runs) for key in ("equal", "equal_prefix"))
        mark = " (differs)" if precision == "fp32" and equal < ALMOST_ALL else ""
        rows.append([system, precision, model, f"{100 * equal:.1f} %{mark}", f"{100 * prefix:.1f} %"])
    text = (
        "Beside tfexport in fp32: sequences that are equal, and tokens before the first that differs; means of cells."
    )
    head = ["system", "precision", "model", "equal sequences", "equal tokens"]
    return _section("Outputs", text, _table(head, rows)) if rows else ""


def _loads(result: Record) -> str:
    rows = []
    for load in result["loads"]:
        ms = [f"{1e3 * statistics.median(load[name]):,.0f}" for name in ("import_s", "load_s", "first_call_s")]
        name = " ".join(filter(None, (load["system"], load["precision"], load["optimize_for"])))
        threads = "default" if load["threads"] is None else str(load["threads"])
        rows.append([load["model"], name, threads, *ms, f"{statistics.median(load['peak_bytes']) / 1e6:,.0f}"])
    text = "Of fresh processes: medians; the first call decodes greedily at batch 1; most resident memory after it."
    head = ["model", "system", "threads", "import, ms", "load, ms", "first call, ms", "memory, MB"]
    return _section("Start and memory", text, _table(head, rows)) if rows else ""


def _not_measured(result: Record) -> str:
    reasons = {(row["model"], row["reason"]): None for row in result["not_measured"]}
    return _section("Not measured", "", _table(["model", "reason"], reasons)) if reasons else ""


def _section(title: str, text: str, table: str) -> str:
    return "\n\n".join(filter(None, (f"### {title}", text, table)))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
