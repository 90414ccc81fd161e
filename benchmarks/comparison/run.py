"""The whole comparison: setting after setting, with progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from comparison.contestants import Contestant, contestants, counted
from comparison.pool import Pool
from comparison.result import Result
from comparison.settings import Setting
from comparison.turns import measure
from comparison.workshop import Workshop


@dataclass(frozen=True, kw_only=True)
class Field:
    """Who competes.

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
    settings: Sequence[Setting], field: Field, workshop: Workshop, result: Result, say: Callable[[str], None]
) -> None:
    """Measure every setting that the result does not have yet, and write it there.

    Args:
        settings: those of one model and kind stand together.
        field: who competes.
        workshop: makes what they load.
        result: grows.
        say: called with lines for a reader.

    Raises:
        BenchError: our own fp32 bundle could not be made or failed.
    """
    shortest = min(setting.source_length for setting in settings)
    missing = [setting for setting in settings if not result.has(setting)]
    clock = _Clock(missing)
    if len(missing) < len(settings):
        say(f"{len(settings) - len(missing)} of {len(settings)} settings are measured already")
    for (model, _), group in groupby(missing, lambda setting: (setting.model, setting.is_quantised)):
        pool = Pool(workshop, model)
        vocab = workshop.vocab(model)
        known: set[Contestant] = set()
        try:
            for setting in group:
                entrants = contestants(
                    setting,
                    peers=field.peers,
                    precisions=field.precisions,
                    shortest_source=shortest,
                    cores=field.cores,
                )
                cell, failures = measure(setting, entrants, pool, vocab=vocab, rounds=field.rounds)
                result.add(cell, pool.loads, failures)
                for contestant in failures.keys() - known:
                    say(f"not measured: {failures[contestant]}")
                known |= failures.keys()
                say(f"{clock.tick(setting)} {setting}: {_headline(cell)}")
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
