#!/usr/bin/env python
"""Compare the decoding speed with CTranslate2, or with another revision of tfexport, on the same weights.

Every system runs in its own process and environment, see requirements.txt and
--python. Outputs are compared before times. Then all systems take turns in
seven rounds; a ratio is the median over rounds of the peer's time over ours,
for the whole call from token ids to token ids. CTranslate2 runs with one thread
and with one per core, and the faster setting counts.

The result is written after every setting, and --resume continues it. Make
tables and a plot with: python benchmarks/report.py FILE.
"""

from __future__ import annotations

import math
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import groupby, product
from pathlib import Path
from typing import Any

import click
import report
from lengths import FIRST_TOKEN
from report import PRECISIONS, SCHEMA, ratios
from runner import (
    CTRANSLATE2,
    CTRANSLATE2_PYTHON,
    DATES,
    NUMBERS,
    OURS,
    PAUSE_S,
    REVISION,
    TURN,
    ResultFile,
    Several,
    Weights,
    Worker,
    agreement,
)
from timing import interleaved, median, repeat

from tfexport.errors import BenchError, TfexportError
from tfexport.runtime.cpu import available_cores

PRESETS = ("tiny", "paper-base", "paper-big")
STUDENTS = ("student-tiny", "student-memory", "student-base")
MODELS = click.Choice((*PRESETS, *STUDENTS, DATES))
PEER_PRECISIONS = {REVISION: ("fp32", "int8"), CTRANSLATE2: ("fp32", "int8")}
# Tokens decoded for each source; a date has no more than 16.
TARGET_LENGTH, DATE_LENGTH = 64, 16
ROUNDS, QUICK_ROUNDS = 7, 3
# Fresh processes that measure load time and memory; the last one continues.
STARTS = 3
# A thread setting that is slower than the best one by this factor in the warm-up is not measured.
CLEARLY_SLOWER = 1.5
# A first call of this many seconds is warm-up enough.
LONG_CALL_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Sizes of one cell; `is_quantised` compares int8 and int4 instead of fp32."""

    model: str
    is_quantised: bool
    source_length: int
    batch_size: int
    num_beams: int
    target_length: int = TARGET_LENGTH

    def request(self, vocab: int) -> dict[str, Any]:
        """Return the request of a call; sources are the same on every call and machine."""
        draw = random.Random(0)
        return {
            "sources": [
                [draw.randrange(FIRST_TOKEN, vocab) for _ in range(self.source_length)] for _ in range(self.batch_size)
            ],
            "num_beams": self.num_beams,
            "new_tokens": self.target_length,
        }

    def __str__(self) -> str:
        kind = "int8 and int4" if self.is_quantised else "fp32"
        decoding = "greedy" if self.num_beams == 1 else f"beam {self.num_beams}"
        return f"{self.model} {kind}, source {self.source_length}, batch {self.batch_size}, {decoding}"


def matrix(
    models: Sequence[str],
    precisions: Sequence[str],
    source_lengths: Sequence[int],
    batch_sizes: Sequence[int],
    num_beams: Sequence[int],
) -> list[Setting]:
    """Return every combination, grouped by model and kind of precision, which share loaded systems."""
    kinds = sorted({precision != "fp32" for precision in precisions})
    return [
        Setting(
            model=model,
            is_quantised=kind,
            source_length=source,
            batch_size=batch,
            num_beams=beams,
            target_length=DATE_LENGTH if model == DATES else TARGET_LENGTH,
        )
        for model, kind, source, batch, beams in product(models, kinds, source_lengths, batch_sizes, num_beams)
    ]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A system in one precision; `threads` None is its own choice, `optimize_for` is an option of our bundles."""

    system: str
    precision: str = "fp32"
    threads: int | None = None
    optimize_for: str | None = None

    def __str__(self) -> str:
        threads = report.counted(self.threads) if self.threads else ""
        return ", ".join(filter(None, (f"{self.system} {self.precision}", self.optimize_for, threads)))


REFERENCE = Variant(system=OURS)


def taking_part(setting: Setting, peers: Sequence[str], precisions: Sequence[str], cores: int) -> list[Variant]:
    """Return the variants of a setting, in the order of a round, ours first."""

    def bundle(system: str, precision: str) -> Variant:
        # As the documentation recommends; only int8 has a variant for throughput.
        aim = "throughput" if precision == "int8" and setting.batch_size > 1 else "latency"
        return Variant(system=system, precision=precision, optimize_for=None if precision == "fp32" else aim)

    wanted = [precision for precision in precisions if (precision != "fp32") == setting.is_quantised]
    found = [bundle(OURS, precision) for precision in wanted]
    # A peer without int4 is compared in int8, even if ours does not run in int8.
    needed = ("int8",) if setting.is_quantised else ("fp32",)
    for peer, precision in product(peers if wanted else (), needed):
        if peer == CTRANSLATE2:
            found += [Variant(system=peer, precision=precision, threads=count) for count in sorted({1, cores})]
        else:
            found.append(bundle(peer, precision))
    return found


class Pool:
    """Processes by variant; a variant that failed once is not tried again.

    Attributes:
        loads: `import_s`, `load_s`, `first_call_s`, `peak_bytes` of each fresh process, and `versions`, by variant.
        failures: error of each variant that failed.
    """

    def __init__(self, weights: Weights, model: str) -> None:
        self.loads: dict[Variant, dict[str, Any]] = {}
        self.failures: dict[Variant, BenchError] = {}
        self._weights, self._model = weights, model
        self._workers: dict[Variant, Worker] = {}

    def ask(self, variant: Variant, op: str, **values: Any) -> dict[str, Any] | None:
        """Ask a variant; return None if it failed, now or before."""
        try:
            if variant not in self._workers and variant not in self.failures:
                self._start(variant, values["sources"][:1], values["new_tokens"])
            return None if variant in self.failures else self._workers[variant].ask(op, **values)
        except BenchError as error:
            if variant == REFERENCE:
                raise
            self.failures[variant] = error
            if worker := self._workers.pop(variant, None):
                worker.close()
            return None

    def close(self) -> None:
        """End all processes."""
        while self._workers:
            self._workers.popitem()[1].close()

    def _start(self, variant: Variant, sources: list[list[int]], new_tokens: int) -> None:
        system, precision = variant.system, variant.precision
        folder = self._weights.prepared(self._model, system, precision, variant.optimize_for)
        load: dict[str, Any] = {"import_s": [], "load_s": [], "first_call_s": [], "peak_bytes": []}
        for _ in range(STARTS):
            if previous := self._workers.pop(variant, None):
                previous.close()
            worker = Worker(str(variant), self._weights.pythons[system], "-m", "workers", system)
            self._workers[variant] = worker
            loaded = worker.ask("load", folder=str(folder.resolve()), precision=precision, threads=variant.threads)
            called = worker.ask("call", sources=sources, num_beams=1, new_tokens=new_tokens)
            load["import_s"].append(loaded["import_s"])
            load["load_s"].append(loaded["load_s"])
            load["first_call_s"].append(called["seconds"])
            load["peak_bytes"].append(worker.ask("peak")["bytes"])
        self.loads[variant] = {**load, "versions": loaded["versions"]}


def measure(setting: Setting, variants: Sequence[Variant], pool: Pool, vocab: int, rounds: int) -> dict[str, Any]:
    """Measure one setting: outputs first, then interleaved rounds.

    Returns:
        The cell as JSON values.
    """
    request = setting.request(vocab)
    reference = pool.ask(REFERENCE, "call", **request)
    assert reference is not None
    runs: dict[Variant, dict[str, Any]] = {}
    for variant in variants:
        called = reference if variant == REFERENCE else pool.ask(variant, "call", **request)
        warm = called and ([called["seconds"]] if called["seconds"] >= LONG_CALL_S else _turn(variant, pool))
        if called and warm:
            agrees = agreement(called["outputs"], reference["outputs"])
            runs[variant] = {**asdict(variant), **agrees, "warm_up_s": warm, "seconds": []}
    for _, variant in interleaved(_good_threads(runs), rounds):
        if variant in runs:
            if turn := _turn(variant, pool):
                runs[variant]["seconds"].append(turn)
            else:
                del runs[variant]
    for run in runs.values():
        run["median_s"] = median(run["seconds"] or [run["warm_up_s"]])
        run["tokens_per_second"] = setting.batch_size * setting.target_length / run["median_s"]
    measured = list(runs.values())
    return {"setting": asdict(setting), "runs": measured, "ratios": ratios(measured)}


def _turn(variant: Variant, pool: Pool) -> list[float] | None:
    time.sleep(PAUSE_S)

    def stopwatch() -> float:
        answer = pool.ask(variant, "time")
        return math.nan if answer is None else float(answer["seconds"])

    seconds = repeat(stopwatch, TURN)
    return None if variant in pool.failures else seconds


def _good_threads(runs: Mapping[Variant, Mapping[str, Any]]) -> list[Variant]:
    warm = {variant: statistics.median(run["warm_up_s"]) for variant, run in runs.items()}
    best = {
        key: min(warm[variant] for variant in warm if (variant.system, variant.precision) == key)
        for key in {(variant.system, variant.precision) for variant in warm}
    }
    return [v for v, seconds in warm.items() if seconds <= CLEARLY_SLOWER * best[v.system, v.precision]]


def compare(
    settings: Sequence[Setting],
    peers: Sequence[str],
    precisions: Sequence[str],
    rounds: int,
    weights: Weights,
    result: ResultFile,
    progress: Callable[[str], None],
) -> None:
    """Measure every setting that is not in the result yet, and write the result after each."""
    missing = [setting for setting in settings if not result.has("setting", asdict(setting))]
    progress(f"{len(settings) - len(missing)} of {len(settings)} settings are in the result")
    for (model, is_quantised), group in groupby(missing, lambda setting: (setting.model, setting.is_quantised)):
        pool = Pool(weights, model)
        try:
            for setting in group:
                variants = taking_part(setting, peers, precisions, available_cores())
                cell = measure(setting, variants, pool, weights.vocab(model), rounds)
                result.document["cells"].append(cell)
                for variant, load in pool.loads.items():
                    _replace(result.document["loads"], {"model": model, **asdict(variant)}, load)
                for variant, error in pool.failures.items():
                    about = {"model": model, "is_quantised": is_quantised, **asdict(variant)}
                    _replace(result.document["not_measured"], about, {"reason": str(error)})
                result.write()
                progress(f"{setting}: {', '.join(map(report.headline, cell['ratios'])) or 'no peer'}")
        finally:
            pool.close()


def _replace(rows: list[dict[str, Any]], about: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    rows[:] = [row for row in rows if {key: row.get(key) for key in about} != about]
    rows.append({**about, **values})


def pythons(given: Sequence[str]) -> dict[str, Path]:
    """Return the Python of each peer."""
    found = {CTRANSLATE2: CTRANSLATE2_PYTHON}
    for setting in given:
        name, _, path = setting.partition("=")
        if name not in PEER_PRECISIONS or not path:
            raise click.BadParameter(f"{setting}: expected NAME=PATH with NAME one of {', '.join(PEER_PRECISIONS)}")
        program = shutil.which(path)
        if not program:
            raise click.BadParameter(f"{setting}: {path} is not a program; give the bin/python of an environment")
        found[name] = Path(program)
    return found


@click.command(help=__doc__)
@click.option("--output", type=click.Path(path_type=Path), required=True, help="JSON file to write.")
@click.option("--models", type=Several(MODELS), default=",".join(PRESETS), show_default=True)
@click.option("--peers", type=Several(click.Choice(tuple(PEER_PRECISIONS))), default=CTRANSLATE2, show_default=True)
@click.option("--precision", type=Several(click.Choice(PRECISIONS)), default=",".join(PRECISIONS), show_default=True,
              help="Of ours; int4 is compared with the peer's int8.")  # fmt: skip
@click.option("--batch-size", type=NUMBERS, default="1,8,32", show_default=True, help="Sources of one call.")
@click.option("--num-beams", type=NUMBERS, default="1,4", show_default=True, help="1 is greedy.")
@click.option("--source-length", type=NUMBERS, default="32,128", show_default=True, help="Tokens of each source.")
@click.option("--rounds", type=click.IntRange(min=1), default=ROUNDS, show_default=True, help="Turns of each system.")
@click.option("--quick", is_flag=True, help=f"{QUICK_ROUNDS} rounds.")
@click.option("--python", "given", multiple=True, metavar="NAME=PATH", help="Python of a peer; repeatable.")
@click.option("--work", type=click.Path(path_type=Path), help="Keep converted weights in this folder and reuse them.")
@click.option("--resume", is_flag=True, help="Continue an interrupted run.")
def main(output: Path, given: tuple[str, ...], work: Path | None, quick: bool, resume: bool, **options: Any) -> None:
    options["rounds"] = QUICK_ROUNDS if quick else options["rounds"]
    environments = pythons(given)
    if missing := [peer for peer in options["peers"] if not environments.get(peer, Path()).is_file()]:
        raise click.ClickException(f"no environment of {', '.join(missing)}; see requirements.txt or give --python")
    names = ("models", "precision", "source_length", "batch_size", "num_beams")
    settings = matrix(*(options[name] for name in names))
    with ExitStack() as stack:
        folder = work or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="side-by-side-")))
        try:
            result = ResultFile(output, SCHEMA, options, resume=resume, loads=[], not_measured=[])
            compare(
                settings, options["peers"], options["precision"], options["rounds"], Weights(folder, environments),
                result, lambda line: click.echo(line, err=True),
            )  # fmt: skip
        except TfexportError as error:
            raise click.ClickException(str(error)) from error
    click.echo(report.render(result.document))


if __name__ == "__main__":
    main()
