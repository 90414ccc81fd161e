#!/usr/bin/env python
"""Decode 500 texts of uneven lengths, greedily and 32 at once, with this tfexport and with another one.

The lengths of sources and of texts are independent and log-normal: median 28, 5
to 120 tokens. The models have the sizes of presets and end each text where its
source asks for it, so that rows leave a batch one after another. Outputs are
compared before interleaved rounds.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import click
from lengths import LONGEST, SUFFIX, corpus
from runner import OURS, PAUSE_S, REVISION, TURN, Weights, Worker, table
from timing import interleaved, median, ratio, repeat

from tfexport.errors import BenchError, TfexportError

MODELS = ("paper-base", "tiny")
HEAD = ("model", "texts", "tokens", "this, tokens/s", "other, tokens/s", "ratio (lowest to highest round)")


def compare(model: str, weights: Weights, count: int, rounds: int) -> list[str]:
    """Measure one model and return a row of the table."""
    texts = corpus(count, weights.vocab(model))
    sources, tokens = [text.source for text in texts], sum(text.length for text in texts)
    seconds: dict[str, list[list[float]]] = {OURS: [], REVISION: []}
    with ExitStack() as stack:
        workers, outputs = {}, []
        for system in seconds:
            folder = weights.prepared(model, system, "fp32")
            workers[system] = stack.enter_context(Worker(system, weights.pythons[system], "-m", "workers", system))
            workers[system].ask("load", folder=str(folder.resolve()), precision="fp32", threads=None)
            found = workers[system].ask("call", sources=sources, num_beams=1, new_tokens=LONGEST, exact=False)
            outputs.append(found["outputs"])
        if outputs[0] != outputs[1] or any(
            len(ids) != text.length for ids, text in zip(outputs[0], texts, strict=True)
        ):
            raise BenchError(f"{model}: the outputs differ or have the wrong lengths; wrong outputs are not timed")
        for _, system in interleaved(list(workers), rounds):
            time.sleep(PAUSE_S)
            seconds[system].append(repeat(lambda worker=workers[system]: float(worker.ask("time")["seconds"]), TURN))
    over = ratio(seconds[REVISION], seconds[OURS])
    speeds = [f"{tokens / median(seconds[system]):,.0f}" for system in seconds]
    name = model.removesuffix(SUFFIX)
    return [name, f"{count:,}", f"{tokens:,}", *speeds, f"{over.median:.2f} ({over.low:.2f} to {over.high:.2f})"]


@click.command(help=__doc__)
@click.option("--beside", required=True, metavar="PYTHON", help="Python of the other tfexport.")
@click.option("--model", "models", type=click.Choice(MODELS), multiple=True, default=MODELS, show_default=True)
@click.option("--texts", type=click.IntRange(min=1), default=500, show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=7, show_default=True, help="Turns of each.")
@click.option("--work", type=click.Path(path_type=Path), help="Keep weights and bundles in this folder and reuse them.")
def main(beside: str, models: tuple[str, ...], texts: int, rounds: int, work: Path | None) -> None:
    python = shutil.which(beside)
    if not python:
        raise click.BadParameter(f"{beside} is not a program; give the bin/python of an environment")
    with ExitStack() as stack:
        folder = work or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="corpus-")))
        weights = Weights(folder, {REVISION: Path(python)})
        try:
            rows = [compare(f"{model}{SUFFIX}", weights, texts, rounds) for model in models]
        except TfexportError as error:
            raise click.ClickException(str(error)) from error
    click.echo(table(HEAD, rows))


if __name__ == "__main__":
    main()
