"""One cell: outputs compared first, then interleaved rounds, then a trace of each contender."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

from comparison.rounds import PAUSE_S, agreement

from stepwise.cells import Cell
from stepwise.pool import Pool
from tfexport.bench.timing import interleaved


def measure(cell: Cell, contenders: Sequence[str], pool: Pool, *, rounds: int, pauses: bool) -> dict[str, Any]:
    """Measure a cell.

    Args:
        cell: what is decoded.
        contenders: who takes part, in the order of turns; outputs are compared with those of the first that decodes.
        pool: of their processes.
        rounds: in which each has one turn.
        pauses: let the threads of one fall asleep before the next has its turn.

    Returns:
        JSON values: `cell`; `reference`, its name; `runs`, one a contender; `failures`, the reasons of the others.
    """
    found = {name: answer["tokens"] for name in contenders if (answer := pool.ask(name, "tokens", batch=cell.batch))}
    reference = next(iter(found), None)
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in found}
    for _, name in interleaved(list(found), rounds):
        if pauses:
            time.sleep(PAUSE_S)
        if turn := pool.ask(name, "turn", batch=cell.batch):
            turns[name].append(turn)
    traces = {name: pool.ask(name, "trace", batch=cell.batch) for name in found}
    runs = [
        {
            "contender": name,
            **agreement(found[name], found[reference]),
            **_summary(cell, turns[name], pool.opened[name]),
            **((traces[name] or {}).get("trace") or dict.fromkeys(("busy_ms", "traced_ms", "given"))),
        }
        for name in found
        if turns[name] and name not in pool.failures and reference is not None
    ]
    failures = {name: pool.failures[name] for name in contenders if name in pool.failures}
    return {"cell": cell.to_dict(), "reference": reference, "runs": runs, "failures": failures}


def _summary(cell: Cell, turns: Sequence[dict[str, float]], opened: dict[str, Any]) -> dict[str, Any]:
    """Say what the rounds come to: medians, the range, and the share of the bandwidth."""
    steps = [turn["step_ms"] for turn in turns]
    median = statistics.median(steps)
    read = opened["weight_bytes"] + cell.batch * opened["cache_bytes"]
    return {
        "step_ms": median,
        "low_ms": min(steps),
        "high_ms": max(steps),
        "cpu_ms": statistics.median(turn["cpu_ms"] for turn in turns),
        "step_bytes": round(read),
        "bandwidth": opened["bandwidth"],
        "bandwidth_share": read / (median / 1000) / opened["bandwidth"],
    }
