#!/usr/bin/env python
"""Answer many callers: the serving engine beside other ways, on the same weights, in one run.

A model ends each text where its source asks for it, with lengths as those of
sentences (log-normal, median 28, 5 to 120 tokens) and all equal. Ways to answer:
the engine with 32 slots; a window, one call for all that arrive within 5 ms, 32
at most; one call a thread, from 8 threads; and CTranslate2, called from 8
threads, and in int8 behind the same window. Each runs with one thread a batch
and with one for each core, and the better counts.

Outputs are compared before times. Then all take turns: in each round a backlog
of requests, in wall time and CPU time, and then trials of Poisson arrivals that
close in on the highest rate whose 99th percentile of latencies keeps a bound.
At the end stands what the engine costs: one idle request beside `generate`, the
gaps of running texts in a burst, and host work between steps.

Make the peer's environment by benchmarks/environments ctranslate2; without it
the peer is left out.
"""

from __future__ import annotations

import json
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from comparison import serving_table
from comparison.contestants import EQUAL, FP32, INT8, PEER, Processes
from comparison.lengths import LONGEST, SUFFIX, corpus, equal_lengths
from comparison.processes import BENCHMARKS
from comparison.serving import Effort, measure
from comparison.systems import DATE_LENGTH, DATES, OURS
from comparison.weights import ConvertedWeights

from tfexport.bench.machine import environment
from tfexport.cores import available_cores
from tfexport.errors import TfexportError

SCHEMA = "tfexport.serving/1"
QUICK = Effort(backlog=12, requests=12, trial_s=0.1, rounds=1, trials=2)
# That requests are made of, one after the other.
NUM_TEXTS = 4000
# Texts of each measurement of what the engine costs; a burst needs 72.
NUM_COSTS = 80


def costs(weights: ConvertedWeights, model: str, tokens: int, num_idle: int) -> dict[str, Any]:
    """Measure what the engine costs with a model, in a process of its own."""
    sources = [text.source[:DATE_LENGTH] for text in corpus(NUM_COSTS, weights.vocab(model))]
    processes = Processes(weights, model)
    try:
        worker = processes.worker(OURS, "fp32", available_cores())
        counts = {"idle": num_idle, "burst": NUM_COSTS, "host": NUM_COSTS}
        return {op: worker.ask(op, sources=sources[:count], tokens=tokens) for op, count in counts.items()}
    finally:
        processes.close()


def run(folder: Path, peer: Path, model: str, effort: Effort, quick: bool) -> dict[str, Any]:
    """Measure everything.

    Args:
        folder: for weights in every system's form; what is there is used.
        peer: Python of CTranslate2's environment.
        model: preset that gives the sizes.
        effort: how long.
        quick: dates alone for what the engine costs.
    """
    pythons = {OURS: Path(sys.executable), PEER: peer}
    ended = ConvertedWeights(folder, pythons, writer="comparison.lengths")
    name = f"{model}{SUFFIX}"
    processes, loads = Processes(ended, name), {}
    tried = sorted({1, available_cores()})
    vocab = ended.vocab(name)
    try:
        for kind, texts, contestants in (
            ("log-normal", corpus(NUM_TEXTS, vocab), FP32),
            ("equal", equal_lengths(NUM_TEXTS, vocab), EQUAL),
            ("log-normal", corpus(NUM_TEXTS, vocab), INT8),
        ):
            found = measure(processes, contestants, texts, tried, effort, lambda line: click.echo(line, err=True))
            loads.setdefault(kind, []).extend(found)
    finally:
        processes.close()
    num_idle = 5 if quick else 30
    found = {DATES: costs(ConvertedWeights(folder, pythons), DATES, DATE_LENGTH, num_idle)}
    if not quick:
        found[model] = costs(ended, name, LONGEST // 2, num_idle)
    return {
        "schema": SCHEMA,
        "environment": environment(available_cores()),
        "versions": processes.versions,
        "model": model,
        "effort": asdict(effort),
        "loads": loads,
        "costs": found,
    }


@click.command(help=__doc__)
@click.option("--output", type=click.Path(path_type=Path), required=True, help="JSON file to write; NAME.md beside it.")
@click.option("--model", type=click.Choice(["paper-base", "tiny"]), default="paper-base", show_default=True,
              help="Preset that gives the sizes.")  # fmt: skip
@click.option("--bound", type=click.FloatRange(min=0, min_open=True), default=Effort.bound_s, show_default=True,
              metavar="SECONDS", help="For the 99th percentile of latencies.")  # fmt: skip
@click.option("--quick", is_flag=True, help="A few requests, to see that it works.")
@click.option("--python", type=click.Path(path_type=Path), help="Of CTranslate2's environment.",
              default=BENCHMARKS.parent / "build" / "peers" / PEER / "bin" / "python")  # fmt: skip
@click.option("--work", type=click.Path(path_type=Path), help="Keep converted weights here, and use those there.")
def main(output: Path, model: str, bound: float, quick: bool, python: Path, work: Path | None) -> None:
    with ExitStack() as stack:
        folder = work or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="serving-")))
        effort = Effort(**{**asdict(QUICK if quick else Effort()), "bound_s": bound})
        try:
            result = run(folder, python, model, effort, quick)
        except TfexportError as error:
            raise click.ClickException(str(error)) from error
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    table = serving_table.render(result)
    output.with_suffix(".md").write_text(table + "\n", encoding="utf-8")
    click.echo(table)


if __name__ == "__main__":
    main()
