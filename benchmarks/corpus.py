#!/usr/bin/env python
"""Decode 500 texts of uneven lengths, greedily and 32 at once, with this tfexport and with another.

The lengths of the sources and, apart from them, of the texts are log-normal:
median 28, 5 to 120 tokens. The models have the sizes of presets and weights
that end each text where its source asks for it, so that a batch is left by one
row after the other. Both export their own bundle and run in a process of their
own. Ids are compared with each other, and lengths with those asked for, before
both take turns in interleaved rounds. The table is Markdown.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import click
from comparison.lengths import LONGEST, SUFFIX, Text, corpus
from comparison.processes import Worker
from comparison.rounds import PAUSE_S, TURN
from comparison.systems import OURS, REVISION, Variant
from comparison.weights import ConvertedWeights

from tfexport.bench.timing import interleaved, median, ratio, repeat
from tfexport.errors import BenchError, TfexportError

MODELS = ("paper-base", "tiny")
SIDES = (Variant(system=OURS), Variant(system=REVISION))
HEAD = """| model | texts | tokens | this, tokens a second | other, tokens a second | ratio (lowest to highest round) |
| --- | --- | --- | --- | --- | --- |"""


def decode(worker: Worker, texts: Sequence[Text]) -> list[list[int]]:
    """Decode the corpus once, which is also what is timed from now on.

    Raises:
        BenchError: a text has another length than its source asks for.
    """
    sources = [text.source for text in texts]
    found: list[list[int]] = worker.ask("call", sources=sources, num_beams=1, new_tokens=LONGEST)["outputs"]
    wrong = sum(len(ids) != text.length for ids, text in zip(found, texts, strict=True))
    if wrong:
        raise BenchError(f"{worker.name}: {wrong} of {len(texts)} texts are not as long as their sources ask for")
    return found


def take_turns(workers: Mapping[str, Worker], rounds: int) -> dict[str, list[list[float]]]:
    """Return the seconds of each system in each round."""
    seconds: dict[str, list[list[float]]] = {name: [] for name in workers}
    for _, name in interleaved(list(workers), rounds):
        time.sleep(PAUSE_S)
        seconds[name].append(repeat(lambda worker=workers[name]: float(worker.ask("time")["seconds"]), TURN))
    return seconds


def compare(model: str, weights: ConvertedWeights, count: int, rounds: int) -> str:
    """Measure one model.

    Returns:
        A row of the table.

    Raises:
        BenchError: a bundle cannot be made or loaded, or the two do not say the same.
    """
    texts = corpus(count, weights.vocab(model))
    with ExitStack() as stack:
        workers, outputs = {}, []
        for side in SIDES:
            bundle = weights.prepared(model, side)
            worker = stack.enter_context(Worker(str(side), weights.python(side), "comparison.workers.corpus"))
            worker.ask("load", folder=str(bundle.resolve()), precision=side.precision, threads=None)
            workers[side.system] = worker
            outputs.append(decode(worker, texts))
        if outputs[0] != outputs[1]:
            differing = sum(one != other for one, other in zip(*outputs, strict=True))
            raise BenchError(f"{model}: {differing} of {count} texts differ; fast and wrong is not timed")
        seconds = take_turns(workers, rounds)
    tokens = sum(text.length for text in texts)
    speeds = [f"{tokens / median(seconds[side.system]):,.0f}" for side in SIDES]
    over = ratio(seconds[REVISION], seconds[OURS])
    cells = [model.removesuffix(SUFFIX), f"{count:,}", f"{tokens:,}", *speeds]
    return f"| {' | '.join(cells)} | {over.median:.2f} ({over.low:.2f} to {over.high:.2f}) |"


@click.command(help=__doc__)
@click.option("--beside", required=True, metavar="PYTHON", help="Python of the other tfexport.")
@click.option("--model", "models", type=click.Choice(MODELS), multiple=True, default=MODELS, show_default=True,
              help="Preset that gives the sizes; repeatable.")  # fmt: skip
@click.option("--texts", type=click.IntRange(min=1), default=500, show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=7, show_default=True, help="Turns of each.")
@click.option("--work", type=click.Path(path_type=Path), help="Keep weights and bundles here, and use those there.")
def main(beside: str, models: tuple[str, ...], texts: int, rounds: int, work: Path | None) -> None:
    python = shutil.which(beside)
    if not python:
        raise click.BadParameter(
            f"{beside} is no program; name the bin/python of an environment", param_hint="--beside"
        )
    with ExitStack() as stack:
        folder = work or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="corpus-")))
        pythons = {OURS: Path(sys.executable), REVISION: Path(python)}
        weights = ConvertedWeights(folder, pythons, writer="comparison.lengths")
        try:
            rows = [compare(f"{model}{SUFFIX}", weights, texts, rounds) for model in models]
        except TfexportError as error:
            raise click.ClickException(str(error)) from error
    click.echo("\n".join([HEAD, *rows]))


if __name__ == "__main__":
    main()
