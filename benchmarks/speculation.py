#!/usr/bin/env python
"""Greedy texts with and without speculation, in turns, in one process: correcting, writing code, normalising dates.

A small model is trained on the first two tasks (--train), models/dates is the third, and random weights, which say what
no source has, show what drafts cost. The trained ones are widened to the sizes of paper-base, where they say the same
and a step costs what it costs there. All are exported with --speculation. Texts are decoded one by one on one thread.
They have to be the same both ways, token for token; what differs is counted.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np
from copying.tasks import CODE, CORRECTION, draw
from copying.training import LONG, train
from copying.widening import widened

import tfexport
from tfexport.decode.loop import Loop
from tfexport.decode.request import check_requests
from tfexport.export import export_bundle
from tfexport.generation import DecodeConfig
from tfexport.graph.config import ExportConfig
from tfexport.models.directory import load_model, save_model

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
from dates_corpus import draw as draw_date
from dates_corpus import formats

ROOT = Path(__file__).resolve().parent.parent
TASKS = ("correction", "code", "dates", "random")
# Tokens of a text of random weights, which has no end.
RANDOM_LENGTH = 60
WAYS: dict[str, dict[str, Any]] = {"off": {}, "on": {"prompt_lookup_num_tokens": 15}}
HEAD = """| model | task | tokens a text | runs on / off | tokens/s off, on | off / on: clock, processor | differ |
|---|---|---|---|---|---|---|"""


@dataclass
class Measured:
    """Of one task on one model: the seconds of each text in each round, by the way, and what was counted."""

    clock: dict[str, list[list[float]]] = field(default_factory=lambda: {way: [] for way in WAYS})
    processor: dict[str, list[list[float]]] = field(default_factory=lambda: {way: [] for way in WAYS})
    counts: Counter[str] = field(default_factory=Counter)

    def row(self, model: str, task: str, texts: int) -> str:
        """Return a row of the table."""
        seconds = {way: sum(map(statistics.median, times)) for way, times in self.clock.items()}
        used = {way: sum(map(statistics.median, times)) for way, times in self.processor.items()}
        tokens, runs = self.counts["tokens"], self.counts["runs on"] / self.counts["runs off"]
        speeds = ", ".join(f"{tokens / seconds[way]:,.0f}" for way in WAYS)
        gains = ", ".join(f"{times['off'] / times['on']:.2f}" for times in (seconds, used))
        cells = [model, task, f"{tokens / texts:.0f}", f"{runs:.2f}", speeds, gains, str(self.counts["differ"])]
        return f"| {' | '.join(cells)} |"


def sources(task: str, model: tfexport.Model, count: int) -> list[list[int]]:
    """Draw the sources of a task."""
    rng = np.random.default_rng(11)
    if task in ("correction", "code"):
        number = CORRECTION if task == "correction" else CODE
        return [draw(number, rng, LONG // 2, LONG)[0] for _ in range(count)]
    if task == "random":  # which repeat themselves, so that there are drafts
        return [rng.choice(rng.integers(4, 1000, 20), 30).tolist() for _ in range(count)]
    forms = tuple(formats())
    texts = [draw_date(rng, forms, held_out_dates=False).text for _ in range(count)]
    assert model.tokenizer is not None
    return model.tokenizer.encode(texts)


def decoder_runs(model: tfexport.Model, text: Sequence[int], options: dict[str, Any]) -> int:
    """Count how often the decoder runs for a text."""
    loop = Loop(model.session, 1)
    loop.submit(check_requests(model.session, [text], DecodeConfig(**options)))
    while loop.is_busy:
        loop.step()
    return loop.num_steps


def measure(model: tfexport.Model, texts: Sequence[Sequence[int]], rounds: int, options: dict[str, Any]) -> Measured:
    """Decode each text both ways, in turns, and again."""
    measured, found = Measured(), dict[str, Any]()
    for text in texts:
        times: dict[str, tuple[list[float], list[float]]] = {way: ([], []) for way in WAYS}
        for turn in range(rounds):
            for way in list(WAYS)[:: 1 if turn % 2 else -1]:
                clock, used = time.perf_counter(), time.process_time()
                (found[way],) = model.generate_ids([text], **WAYS[way], **options)
                times[way][0].append(time.perf_counter() - clock)
                times[way][1].append(time.process_time() - used)
        for way, (clocks, processors) in times.items():
            measured.clock[way].append(clocks)
            measured.processor[way].append(processors)
            measured.counts[f"runs {way}"] += decoder_runs(model, text, {**WAYS[way], **options})
        tokens = {way: best.token_ids for way, (best,) in found.items()}
        measured.counts["tokens"] += len(tokens["off"])
        measured.counts["differ"] += tokens["off"] != tokens["on"]
    return measured


def model_of(task: str, size: str, work: Path) -> tuple[str, str]:
    """Return what is exported for a task, and its name; what is widened is written into `work`."""
    if task == "random":
        preset = "paper-base" if size == "base" else "tiny"
        return f"preset:{preset}", preset
    small = ROOT / "models" / "dates" if task == "dates" else work / "copier"
    if size == "small":
        return str(small), small.name
    wide, tokenizer = work / f"{small.name}-base", small / "tokenizer.json"
    if not wide.exists():
        save_model(widened(load_model(small)), wide, tokenizer if tokenizer.exists() else None)
    return str(wide), wide.name


def bundle(model: str, output: Path, precision: str) -> Path:
    """Export a model, unless it is there already."""
    if not output.exists():
        config = ExportConfig(precision=precision, forms=("contrib",), speculation=True)  # type: ignore[arg-type]
        export_bundle(model, output, config, verify=False, report=click.echo)
    return output


@click.command()
@click.option("--work", type=click.Path(path_type=Path), required=True, help="Folder for models and bundles.")
@click.option("--train", "steps", type=click.IntRange(min=0), default=0, help="Steps; 0 takes the model that is there.")
@click.option("--texts", type=click.IntRange(min=1), default=30, help="Of each task.")
@click.option("--rounds", type=click.IntRange(min=1), default=5)
@click.option("--precision", "precisions", multiple=True, default=("fp32", "int8"))
@click.option("--size", "sizes", multiple=True, type=click.Choice(["base", "small"]), default=("base",))
@click.option("--task", "tasks", multiple=True, type=click.Choice(TASKS), default=TASKS)
def main(
    work: Path,
    steps: int,
    texts: int,
    rounds: int,
    precisions: tuple[str, ...],
    sizes: tuple[str, ...],
    tasks: tuple[str, ...],
) -> None:
    """Measure and print a table."""
    if steps:
        train(work / "copier", steps, batch_size=32, seed=0)
    rows = []
    for size in sizes:
        for precision in precisions:
            for task in tasks:
                length = {"max_new_tokens": RANDOM_LENGTH} if task == "random" else {}
                source, name = model_of(task, size, work)
                path = bundle(source, work / f"{name}-{precision}", precision)
                with tfexport.load(path, threads=1) as model:
                    found = measure(model, sources(task, model, texts), rounds, length)
                rows.append(found.row(f"{size}, {precision}", task, texts))
                click.echo(rows[-1])
    click.echo("\n".join([HEAD, *rows]))


if __name__ == "__main__":
    main()
