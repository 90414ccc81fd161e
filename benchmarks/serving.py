#!/usr/bin/env python
"""Answer many callers: the serving engine compared with other ways, on the same weights.

A model ends each text where its source asks for it, with log-normal lengths.
Contestants: the engine with 32 slots; one call per window of 5 ms, at most 32
requests; one call per thread, from 8 threads; CTranslate2 from 8 threads, and in
int8 after the same window. Each runs with one thread per batch and with one per
core, and the better setting counts.

Outputs are compared before times. In each round, a backlog of requests is
answered, in wall and CPU time; then trials of Poisson arrivals bisect the highest
rate whose 99th percentile of latencies keeps a bound. Without CTranslate2's
environment, see requirements.txt, that peer is left out.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np
from lengths import SUFFIX, Text, corpus
from runner import CTRANSLATE2, CTRANSLATE2_PYTHON, OURS, PAUSE_S, Weights, Worker, agreement, table
from timing import interleaved

from tfexport.bench.machine import environment
from tfexport.errors import BenchError, TfexportError
from tfexport.runtime.cpu import available_cores

SCHEMA = "tfexport.serving/2"
# System, precision and policy.
CONTESTANTS = (
    (OURS, "fp32", "engine"),
    (OURS, "fp32", "window"),
    (OURS, "fp32", "threads"),
    (CTRANSLATE2, "fp32", "threads"),
    (OURS, "int8", "engine"),
    (CTRANSLATE2, "int8", "window"),
)
NUM_TEXTS = 4000
# In int8 texts may be a little longer or shorter than their sources ask for.
TOTAL_WITHIN = 0.15
# Of the capacity: the first rate, and the assumed bounds of the search.
FIRST, KEPT, TOO_MUCH = 0.75, 0.25, 1.5
# Requests are given up this many times the bound after the last arrival.
LIMIT = 3.0


@dataclass
class Standing:
    """What is known of a contestant; `low` and `high` bound its highest rate, 0 if unknown."""

    name: str
    worker: Worker
    policy: str
    threads: int
    agreement: dict[str, float]
    backlogs: list[dict[str, Any]] = field(default_factory=list)
    trials: list[dict[str, Any]] = field(default_factory=list)
    low: float = 0.0
    high: float = 0.0

    def run(
        self, texts: Sequence[Text], arrivals: list[float] | None = None, bound_s: float = 28_800.0
    ) -> dict[str, Any]:
        """Answer texts, all at once or on a schedule."""
        sources = [text.source for text in texts]
        found = self.worker.ask(
            "answer", policy=self.policy, sources=sources, arrivals=arrivals, limit_s=LIMIT * bound_s
        )
        latencies = [math.inf if one is None else one for one in found.pop("latencies_s")]
        p99_s = float(np.quantile(latencies, 0.99, method="higher"))
        return {"requests": len(texts), "p99_s": p99_s if math.isfinite(p99_s) else None, **found}

    @property
    def capacity(self) -> float:
        """Requests per second of a backlog."""
        return statistics.median(run["requests"] / run["wall_s"] for run in self.backlogs)

    @property
    def next_rate(self) -> float:
        """The rate to try next."""
        if not self.trials:
            return FIRST * self.capacity
        return math.sqrt((self.low or KEPT * self.capacity) * (self.high or TOO_MUCH * self.capacity))

    def note(self, rate: float, run: dict[str, Any], bound_s: float) -> None:
        """Record a trial."""
        self.trials.append({"rate": rate, **run})
        if run["p99_s"] is not None and run["p99_s"] <= bound_s:
            self.low = rate
        else:
            self.high = rate

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            "name": self.name,
            "threads": self.threads,
            "agreement": self.agreement,
            "backlogs": self.backlogs,
            "trials": self.trials,
            "requests_per_second": self.capacity,
            "requests_per_cpu_second": statistics.median(run["requests"] / run["cpu_s"] for run in self.backlogs),
            "highest_rate": self.low,
        }


def begin(
    weights: Weights, model: str, contestant: tuple[str, str, str], texts: Sequence[Text], stack: ExitStack
) -> Standing:
    """Load a contestant with each number of threads, check its outputs, and keep the faster setting."""
    system, precision, policy = contestant
    folder = weights.prepared(model, system, precision, "throughput" if (system, precision) == (OURS, "int8") else None)
    found = []
    for threads in sorted({1, available_cores()}):
        name = f"{system} {precision}, {policy}"
        module = "engine" if policy == "engine" else system
        worker = stack.enter_context(Worker(name, weights.pythons[system], "-m", "workers", module))
        parallel = max(1, available_cores() // threads) if system == CTRANSLATE2 else 1
        worker.ask("load", folder=str(folder.resolve()), precision=precision, threads=threads, parallel=parallel)
        standing = Standing(name, worker, policy, threads, {})
        standing.run(texts)  # the warm-up
        found.append((standing, standing.run(texts)))
    best, run = min(found, key=lambda one: float(one[1]["wall_s"]))
    asked, said = sum(text.length - 1 for text in texts), sum(map(len, run["outputs"]))
    if abs(said - asked) > (0.0 if precision == "fp32" else TOTAL_WITHIN) * asked:
        raise BenchError(f"{best.name}: {said} tokens, expected {asked}; different work is not timed")
    best.agreement = {"tokens": said / asked}
    best.trials, best.backlogs = [], [run]
    return best


def measure(
    weights: Weights, model: str, num_backlog: int, trial_s: float, rounds: int, trials: int, bound_s: float
) -> list[dict[str, Any]]:
    """Measure all contestants."""
    texts = corpus(NUM_TEXTS, weights.vocab(model))
    backlog, standings = texts[:num_backlog], list[Standing]()
    expected: list[list[int]] = []
    with ExitStack() as stack:
        for contestant in sorted(CONTESTANTS, key=lambda one: one[2] != "window" or one[1] != "fp32"):
            try:
                standing = begin(weights, model, contestant, backlog, stack)
            except BenchError as error:
                if contestant[0] == OURS:
                    raise
                click.echo(f"not measured: {error}", err=True)
                continue
            outputs = standing.backlogs.pop()["outputs"]
            expected = expected or outputs
            if contestant[:2] == (OURS, "fp32") and outputs != expected:
                raise BenchError(f"{standing.name}: differs from generate; wrong outputs are not timed")
            standing.agreement |= agreement(outputs, expected)
            standings.append(standing)
        for _, standing in interleaved(standings, rounds):
            time.sleep(PAUSE_S)
            run = standing.run(backlog)
            del run["outputs"]
            standing.backlogs.append(run)
            click.echo(f"{standing.name}: {run['requests'] / run['wall_s']:.2f} requests a second", err=True)
        for number, standing in interleaved(standings, trials):
            time.sleep(PAUSE_S)
            rate = standing.next_rate
            chosen = texts[: max(num_backlog, int(trial_s * standing.capacity))]
            gaps = np.random.default_rng(number).exponential(1 / rate, len(chosen))
            run = standing.run(chosen, np.cumsum(gaps).tolist(), bound_s)
            del run["outputs"]
            standing.note(rate, run, bound_s)
            click.echo(f"{standing.name}: {rate:.2f} requests a second, p99 {run['p99_s']} s", err=True)
        return [standing.to_dict() for standing in standings]


def render(result: dict[str, Any]) -> str:
    """Return a result as Markdown."""
    about = result["environment"]
    rows = [
        [
            one["name"],
            str(one["threads"]),
            f"{one['agreement']['equal']:.0%}",
            f"{one['agreement']['tokens']:.0%}",
            *(f"{one[key]:.2f}" for key in ("requests_per_second", "requests_per_cpu_second", "highest_rate")),
        ]
        for one in result["contestants"]
    ]
    head = ["", "threads", "equal texts", "tokens", "requests a second", "a CPU second", "highest rate"]
    return f"{about['cpu']}, {about['date'][:10]}; p99 within {result['bound_s']:g} s\n\n{table(head, rows)}"


@click.command(help=__doc__)
@click.option(
    "--output", type=click.Path(path_type=Path), required=True, help="JSON file to write; NAME.md next to it."
)
@click.option("--model", type=click.Choice(["paper-base", "tiny"]), default="paper-base", show_default=True,
              help="Preset that gives the sizes.")  # fmt: skip
@click.option("--bound", type=click.FloatRange(min=0, min_open=True), default=3.0, show_default=True, metavar="SECONDS",
              help="For the 99th percentile of latencies.")  # fmt: skip
@click.option("--quick", is_flag=True, help="A few requests, to see that it works.")
@click.option("--python", type=click.Path(path_type=Path), default=CTRANSLATE2_PYTHON, help="Of CTranslate2.")
@click.option("--work", type=click.Path(path_type=Path), help="Keep converted weights in this folder and reuse them.")
def main(output: Path, model: str, bound: float, quick: bool, python: Path, work: Path | None) -> None:
    effort = (12, 0.1, 1, 2) if quick else (96, 20.0, 3, 6)
    with ExitStack() as stack:
        folder = work or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="serving-")))
        try:
            found = measure(Weights(folder, {CTRANSLATE2: python}), f"{model}{SUFFIX}", *effort, bound)
        except TfexportError as error:
            raise click.ClickException(str(error)) from error
    about = environment(available_cores())
    result = {"schema": SCHEMA, "environment": about, "model": model, "bound_s": bound, "contestants": found}
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    output.with_suffix(".md").write_text(render(result) + "\n", encoding="utf-8")
    click.echo(render(result))


if __name__ == "__main__":
    main()
