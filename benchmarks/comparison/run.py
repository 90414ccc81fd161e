"""The whole comparison: setting after setting, with progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from comparison.result import Result
from comparison.rounds import WorkerPool, measure
from comparison.systems import Setting, Variant, counted, taking_part
from comparison.weights import ConvertedWeights


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Who takes part, and how often.

    Attributes:
        peers: names of systems.
        precisions: of ours.
        cores: that a process may use.
        rounds: in which all but the slow systems take part.
    """

    peers: Sequence[str]
    precisions: Sequence[str]
    cores: int
    rounds: int


def compare(
    settings: Sequence[Setting],
    selection: Selection,
    weights: ConvertedWeights,
    result: Result,
    report: Callable[[str], None],
) -> None:
    """Measure every setting that the result does not have yet, and write it there.

    Args:
        settings: those of one model and kind stand together.
        selection: who takes part.
        weights: makes what they load.
        result: grows.
        report: told what happens, a line at a time.

    Raises:
        BenchError: our own fp32 bundle could not be made or failed.
    """
    shortest = min(setting.source_length for setting in settings)
    missing = [setting for setting in settings if not result.has(setting)]
    clock = _Clock(missing)
    if len(missing) < len(settings):
        report(f"{len(settings) - len(missing)} of {len(settings)} settings are measured already")
    for (model, _), group in groupby(missing, lambda setting: (setting.model, setting.is_quantised)):
        pool = WorkerPool(weights, model)
        vocab = weights.vocab(model)
        known: set[Variant] = set()
        try:
            for setting in group:
                variants = taking_part(
                    setting,
                    peers=selection.peers,
                    precisions=selection.precisions,
                    shortest_source=shortest,
                    cores=selection.cores,
                )
                cell, failures = measure(setting, variants, pool, vocab=vocab, rounds=selection.rounds)
                result.add(cell, pool.loads, failures)
                for variant in failures.keys() - known:
                    report(f"not measured: {failures[variant]}")
                known |= failures.keys()
                report(f"{clock.tick(setting)} {setting}: {_headline(cell)}")
        finally:
            pool.close()


def _headline(cell: dict[str, Any]) -> str:
    shown = []
    for pair in cell["ratios"]:
        threads = f" ({counted(pair['peer_threads'])})" if pair["peer"] == "ctranslate2" else ""
        shown.append(
            f"{pair['precision']} {pair['ratio']:.2f} ({pair['low']:.2f} to {pair['high']:.2f}) × {pair['peer']} "
            f"{pair['peer_precision']}{threads}"
        )
    speeds = [f"{run['tokens_per_second']:,.0f} tokens/s" for run in cell["runs"][:1]]
    return "; ".join([*shown, *speeds]) or "nobody to compare with"


class _Clock:
    """Counts settings and guesses how long the others take."""

    def __init__(self, settings: Sequence[Setting]) -> None:
        self._total = len(settings)
        self._left = sum(setting.cost for setting in settings)
        self._done, self._count, self._began = 0.0, 0, time.monotonic()

    def tick(self, setting: Setting) -> str:
        """Count one setting as measured; say how many are, and the minutes left."""
        self._count += 1
        self._done += setting.cost
        self._left -= setting.cost
        minutes = (time.monotonic() - self._began) / self._done * max(0.0, self._left) / 60
        return f"[{self._count}/{self._total}, {minutes:.0f} min left]"
