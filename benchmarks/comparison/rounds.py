"""One setting: each system loaded in a process of its own, outputs compared, then interleaved rounds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from comparison.processes import Worker, start
from comparison.result import ratios
from comparison.systems import REFERENCE, SYSTEMS, Setting, Variant
from comparison.weights import ConvertedWeights
from tfexport.bench.timing import Effort, interleaved, median, repeat
from tfexport.errors import BenchError

# Fresh processes whose load time and memory are measured; the last one goes on to decode.
STARTS = 3
# Before each turn: long enough for the threads of the one before to fall asleep (OpenMP's spin for up to 0.2 s).
PAUSE_S = 0.25
# Quick calls are repeated; one that takes half a second is known well enough.
TURN = Effort(warm_up=1, least_runs=3, least_s=0.2, long_s=0.5)
# Of the systems that are slow.
SLOW_ROUNDS = 3
# A thread setting that is so much slower than the system's best before the rounds takes no part in them.
CLEARLY_SLOWER = 1.5
# A first call that takes so long is warm-up enough, and known well enough to tell thread settings apart.
LONG_CALL_S = 2.0

Outputs = list[list[int]]


class WorkerPool:
    """Processes by variant; a system that failed once is not tried again.

    Attributes:
        loads: what loading each variant took: `import_s`, `load_s`, `first_call_s` and `peak_bytes`, one of each
            for every fresh process, and `versions`.
    """

    def __init__(self, weights: ConvertedWeights, model: str) -> None:
        """Begin empty."""
        self.loads: dict[Variant, dict[str, Any]] = {}
        self._weights, self._model = weights, model
        self._workers: dict[Variant, Worker] = {}
        self._failures: dict[Variant, BenchError] = {}

    def worker(self, variant: Variant, setting: Setting) -> Worker:
        """Return a variant's process; the first time, start it and measure its start at a batch of 1.

        Raises:
            BenchError: it has no environment, its weights could not be made, or it failed or died.
        """
        if variant in self._failures:
            raise self._failures[variant]
        if variant not in self._workers:
            try:
                self._start(variant, replace(setting, batch_size=1, num_beams=1))
            except BenchError as error:
                self.fail(variant, error)
                raise
        return self._workers[variant]

    def fail(self, variant: Variant, error: BenchError) -> None:
        """End a variant's process; it takes no further part."""
        self._failures[variant] = error
        if worker := self._workers.pop(variant, None):
            worker.close()

    def close(self) -> None:
        """End all processes."""
        while self._workers:
            self._workers.popitem()[1].close()

    def _start(self, variant: Variant, first: Setting) -> None:
        folder = self._weights.prepared(self._model, variant)
        sources = first.sources(self._weights.vocab(self._model))
        load: dict[str, Any] = {"import_s": [], "load_s": [], "first_call_s": [], "peak_bytes": []}
        for _ in range(1 if SYSTEMS[variant.system].is_slow else STARTS):
            if previous := self._workers.pop(variant, None):
                previous.close()
            worker = start(str(variant), variant.system, self._weights.python(variant))
            self._workers[variant] = worker
            loaded = worker.ask(
                "load", folder=str(folder.resolve()), precision=variant.precision, threads=variant.threads
            )
            called = worker.ask("call", sources=sources, num_beams=1, new_tokens=first.target_length)
            for name, value in (
                ("import_s", loaded["import_s"]),
                ("load_s", loaded["load_s"]),
                ("first_call_s", called["seconds"]),
                ("peak_bytes", worker.ask("peak")["bytes"]),
            ):
                load[name].append(value)
        self.loads[variant] = {**load, "versions": loaded["versions"]}


def measure(
    setting: Setting, variants: Sequence[Variant], pool: WorkerPool, *, vocab: int, rounds: int
) -> tuple[dict[str, Any], dict[Variant, str]]:
    """Measure one setting.

    Args:
        setting: sizes.
        variants: who takes part, in the order of turns.
        pool: of loaded systems.
        vocab: source tokens of the model.
        rounds: in which each system but the slow ones has one turn.

    Returns:
        The cell as JSON values, and why a variant has no place in it.

    Raises:
        BenchError: our own fp32 bundle, which outputs are compared with, failed.
    """
    request = {
        "sources": setting.sources(vocab),
        "num_beams": setting.num_beams,
        "new_tokens": setting.target_length,
    }
    reference = pool.worker(REFERENCE, setting).ask("call", **request)
    runs: dict[Variant, dict[str, Any]] = {}
    failures: dict[Variant, str] = {}
    for variant in variants:
        try:
            called = reference if variant == REFERENCE else pool.worker(variant, setting).ask("call", **request)
            # The first call of slow systems may compile.
            is_warm = called["seconds"] >= LONG_CALL_S and not SYSTEMS[variant.system].is_slow
            runs[variant] = {
                **variant.to_dict(),
                **agreement(called["outputs"], reference["outputs"]),
                "warm_up_s": [called["seconds"]] if is_warm else _turn(variant, pool, setting),
                "seconds": [],
            }
        except BenchError as error:
            _give_up(variant, error, pool, failures)
    for number, variant in interleaved(list(runs), rounds):
        if variant not in _taking_part(runs, number):
            continue
        try:
            runs[variant]["seconds"].append(_turn(variant, pool, setting))
        except BenchError as error:
            _give_up(variant, error, pool, failures)
            del runs[variant]
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


def _turn(variant: Variant, pool: WorkerPool, setting: Setting) -> list[float]:
    worker = pool.worker(variant, setting)
    time.sleep(PAUSE_S)
    return repeat(lambda: float(worker.ask("time")["seconds"]), TURN)


def _taking_part(runs: dict[Variant, dict[str, Any]], number: int) -> list[Variant]:
    """List who has a turn in a round: the slow ones in the first few, and of each system only good thread settings."""
    warm = {variant: statistics.median(run["warm_up_s"]) for variant, run in runs.items()}
    best: dict[tuple[str, str], float] = {}
    for variant, seconds in warm.items():
        key = variant.system, variant.precision
        best[key] = min(seconds, best.get(key, seconds))
    return [
        variant
        for variant in runs
        if warm[variant] <= CLEARLY_SLOWER * best[variant.system, variant.precision]
        and (number < SLOW_ROUNDS or not SYSTEMS[variant.system].is_slow)
    ]


def _give_up(variant: Variant, error: BenchError, pool: WorkerPool, failures: dict[Variant, str]) -> None:
    if variant == REFERENCE:
        raise error
    pool.fail(variant, error)
    failures[variant] = str(error)


def _summarised(run: dict[str, Any], setting: Setting) -> dict[str, Any]:
    """Add the median over turns of each turn's median call, of the warm-up where there were no others."""
    seconds = median(run["seconds"] or [run["warm_up_s"]])
    return {**run, "median_s": seconds, "tokens_per_second": setting.tokens / seconds}
