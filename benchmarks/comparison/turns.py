"""One setting: outputs are compared first, then all systems take turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

from comparison.contestants import REFERENCE, SYSTEMS, Contestant
from comparison.pool import Pool
from comparison.settings import Setting
from comparison.summary import ratios
from tfexport.errors import BenchError

# Before each turn: long enough for the threads of the one before to fall asleep (OpenMP's spin for up to 0.2 s).
PAUSE_S = 0.25
# Of the systems that are slow.
SLOW_ROUNDS = 3
# A thread setting that is so much slower than the system's best before the rounds takes no part in them.
CLEARLY_SLOWER = 1.5
# A first call that takes so long is warm-up enough, and known well enough to tell thread settings apart.
LONG_CALL_S = 2.0

Outputs = list[list[int]]


def measure(
    setting: Setting, entrants: Sequence[Contestant], pool: Pool, *, vocab: int, rounds: int
) -> tuple[dict[str, Any], dict[Contestant, str]]:
    """Measure one setting.

    Args:
        setting: sizes.
        entrants: who takes part, in the order of turns.
        pool: of loaded systems.
        vocab: source tokens of the model.
        rounds: in which each system but the slow ones has one turn.

    Returns:
        The cell as JSON values, and why a contestant has no place in it.

    Raises:
        BenchError: our own fp32 bundle, which outputs are compared with, failed.
    """
    request = {
        "sources": setting.sources(vocab),
        "num_beams": setting.num_beams,
        "new_tokens": setting.target_length,
    }
    reference = pool.worker(REFERENCE, setting).ask("call", **request)
    runs: dict[Contestant, dict[str, Any]] = {}
    failures: dict[Contestant, str] = {}
    for entrant in entrants:
        try:
            called = reference if entrant == REFERENCE else pool.worker(entrant, setting).ask("call", **request)
            # The first call of slow systems may compile.
            is_warm = called["seconds"] >= LONG_CALL_S and not SYSTEMS[entrant.system].is_slow
            runs[entrant] = {
                **entrant.to_dict(),
                **agreement(called["outputs"], reference["outputs"]),
                "warm_up_s": [called["seconds"]] if is_warm else _turn(entrant, pool, setting),
                "seconds": [],
            }
        except BenchError as error:
            _give_up(entrant, error, pool, failures)
    for number in range(rounds):
        for entrant in _taking_part(runs, number):
            try:
                runs[entrant]["seconds"].append(_turn(entrant, pool, setting))
            except BenchError as error:
                _give_up(entrant, error, pool, failures)
                del runs[entrant]
    measured = [_summarised(run, setting) for run in runs.values()]
    return {"setting": setting.to_dict(), "runs": measured, "ratios": ratios(measured)}, failures


def agreement(outputs: Outputs, expected: Outputs) -> dict[str, float]:
    """Compare outputs with those of our fp32 bundle.

    Returns:
        `equal`, the share of sequences that are the same, and `equal_prefix`, the share of tokens before the first
        that differs.
    """
    assert len(outputs) == len(expected)
    prefixes = [
        next((at for at, (one, other) in enumerate(zip(found, wanted, strict=False)) if one != other), len(wanted))
        for found, wanted in zip(outputs, expected, strict=True)
    ]
    return {
        "equal": statistics.fmean(found == wanted for found, wanted in zip(outputs, expected, strict=True)),
        "equal_prefix": sum(prefixes) / sum(map(len, expected)),
    }


def _turn(entrant: Contestant, pool: Pool, setting: Setting) -> list[float]:
    worker = pool.worker(entrant, setting)
    time.sleep(PAUSE_S)
    seconds: list[float] = worker.ask("time")["seconds"]
    return seconds


def _taking_part(runs: dict[Contestant, dict[str, Any]], number: int) -> list[Contestant]:
    """List who has a turn in a round: the slow ones in the first few, and of each system only good thread settings."""
    warm = {entrant: statistics.median(run["warm_up_s"]) for entrant, run in runs.items()}
    best: dict[tuple[str, str], float] = {}
    for entrant, seconds in warm.items():
        key = entrant.system, entrant.precision
        best[key] = min(seconds, best.get(key, seconds))
    return [
        entrant
        for entrant in runs
        if warm[entrant] <= CLEARLY_SLOWER * best[entrant.system, entrant.precision]
        and (number < SLOW_ROUNDS or not SYSTEMS[entrant.system].is_slow)
    ]


def _give_up(entrant: Contestant, error: BenchError, pool: Pool, failures: dict[Contestant, str]) -> None:
    if entrant == REFERENCE:
        raise error
    pool.fail(entrant, error)
    failures[entrant] = str(error)


def _summarised(run: dict[str, Any], setting: Setting) -> dict[str, Any]:
    """Add the median over turns of each turn's median call, of the warm-up where there were no others."""
    seconds = statistics.median(map(statistics.median, run["seconds"] or [run["warm_up_s"]]))
    return {**run, "median_s": seconds, "tokens_per_second": setting.tokens / seconds}
