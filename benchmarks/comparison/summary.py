"""What the times say: ratios between systems and their geometric means."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from comparison.contestants import OURS, PRECISIONS


def ratios(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Compare ours in each precision with each peer, at the peer's fastest number of threads.

    Args:
        runs: of one setting, each with `system`, `precision`, `threads`, `median_s` and `seconds`, one list of calls
            for each turn.

    Returns:
        For each pair `ratio`, the median over rounds of the peer's time over ours in the same round, above 1 where
        ours is faster; `low` and `high` of the rounds; who was compared. A peer without rounds is left out.
    """
    found = []
    for ours in (run for run in runs if run["system"] == OURS):
        for peer in fastest(run for run in runs if run["system"] != OURS and run["seconds"]):
            pairs = zip(peer["seconds"], ours["seconds"], strict=False)
            each = [statistics.median(theirs) / statistics.median(own) for theirs, own in pairs]
            found.append(
                {
                    "precision": ours["precision"],
                    "peer": peer["system"],
                    "peer_precision": peer["precision"],
                    "peer_threads": peer["threads"],
                    "ratio": statistics.median(each),
                    "low": min(each),
                    "high": max(each),
                }
            )
    return found


def fastest(runs: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Keep of each system and precision the number of threads with the lowest median."""
    best: dict[tuple[str, str], Mapping[str, Any]] = {}
    for run in runs:
        key = run["system"], run["precision"]
        if key not in best or run["median_s"] < best[key]["median_s"]:
            best[key] = run
    return list(best.values())


def geometric_mean(values: Iterable[float]) -> float:
    """Return the geometric mean of numbers above 0, of at least one."""
    return math.exp(statistics.fmean(map(math.log, values)))


def pairs(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return every ratio of a result as one flat record: its setting, the ratio, and the runs `ours` and `theirs`.

    They are in the order of tables: models as measured, then precisions, decoding and sizes.
    """
    found = []
    for cell in result["cells"]:
        runs = {(run["system"], run["precision"], run["threads"]): run for run in cell["runs"]}
        for ratio in cell["ratios"]:
            ours = runs[OURS, ratio["precision"], None]
            peer = runs[ratio["peer"], ratio["peer_precision"], ratio["peer_threads"]]
            found.append({**cell["setting"], **ratio, "ours": ours, "theirs": peer})
    models = list(dict.fromkeys(pair["model"] for pair in found))
    return sorted(
        found,
        key=lambda pair: (
            models.index(pair["model"]),
            PRECISIONS.index(pair["precision"]),
            *(pair[name] for name in ("num_beams", "source_length", "batch_size")),
        ),
    )


def means(result: Mapping[str, Any], peer: str) -> dict[str, tuple[float, int]]:
    """Return geometric means over a peer, with how many cells each has: by precision and decoding, and overall."""
    groups: dict[str, list[float]] = {}
    for pair in pairs(result):
        if pair["peer"] == peer:
            decoding = "greedy" if pair["num_beams"] == 1 else f"beam {pair['num_beams']}"
            same = pair["precision"] == pair["peer_precision"]
            names = [f"{pair['precision']} {decoding}", *([decoding] if same else [])]
            if pair["precision"] == "int4" and pair["batch_size"] == 1:
                names.append("int4 at batch 1")
            for name in names:
                groups.setdefault(name, []).append(pair["ratio"])
    return {name: (geometric_mean(values), len(values)) for name, values in groups.items()}
