"""Define the commands `score`, `align`, `embed` and `classify`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, get_args

import click

from tfexport.cli.commands import main
from tfexport.cli.options import TextRun, json_option, text_options
from tfexport.cli.terminal import inputs_of, json_text, lines_to, progress, split_pairs
from tfexport.contract import Pooling

if TYPE_CHECKING:
    from tfexport.model.model import Model


@contextmanager
def _opened(run: TextRun, count: int, label: str) -> Iterator[tuple[Model, Callable[[str], None], dict[str, Any]]]:
    """Yield the loaded bundle, a writer of lines, and the arguments of a call."""
    from tfexport.model.load import load

    with (
        load(run.bundle, **run.loading) as model,
        lines_to(run.output) as write,
        progress(count, run.batch_size, label) as tick,
    ):
        yield model, write, {"batch_size": run.batch_size, "on_progress": tick}


@main.command()
@text_options()
@click.option("--add-eos/--no-add-eos", default=True, help="Score the end token after each target too.")
@json_option
def score(run: TextRun, add_eos: bool, as_json: bool) -> None:
    """Print the log-probability of the target of each TEXT, given its source.

    It is the sum over the target's tokens. A TEXT is a source and a target with a tab between them, or a JSON object
    with "input" and "text", as tfexport generate --json writes it. Without TEXT and --input it reads standard input,
    one pair per line.
    """
    sources, targets = split_pairs(inputs_of(run.texts, run.source))
    with _opened(run, len(sources), "scoring") as (model, write, call):
        scores = model.score(sources, targets, add_eos=add_eos, **call)
        for index, (text, target, one) in enumerate(zip(sources, targets, scores, strict=True)):
            if as_json:
                write(json_text({"index": index, "input": text, "text": target, **dataclasses.asdict(one)}))
            else:
                write(f"{one.log_prob:z.4f}")


@main.command()
@text_options()
@json_option
def align(run: TextRun, as_json: bool) -> None:
    """Print the source token that each target token of each TEXT attends to.

    Pairs such as 0-0 1-2 are positions in source and target, from 0; --json prints the tokens and all weights. A TEXT
    is as for tfexport score. The bundle must have been exported with --alignment.
    """
    sources, targets = split_pairs(inputs_of(run.texts, run.source))
    with _opened(run, len(sources), "aligning") as (model, write, call):
        found = model.align(sources, targets, **call)
        for index, (text, target, one) in enumerate(zip(sources, targets, found, strict=True)):
            if as_json:
                values = {**dataclasses.asdict(one), "weights": one.weights.tolist()}
                write(json_text({"index": index, "input": text, "text": target, **values}))
            else:
                write(" ".join(f"{place}-{number}" for number, place in enumerate(one.source_positions)))


@main.command()
@text_options()
@click.option(
    "--pooling",
    type=click.Choice(get_args(Pooling)),
    help="How to combine the vectors of the tokens; by default as the bundle declares.",
)
@click.option("--normalize/--no-normalize", default=True, help="Scale every vector to length 1.")
def embed(run: TextRun, pooling: Pooling | None, normalize: bool) -> None:
    """Print the embedding of each TEXT, one JSON object per line."""
    inputs = inputs_of(run.texts, run.source)
    with _opened(run, len(inputs), "embedding") as (model, write, call):
        vectors = model.embed(inputs, pooling=pooling, normalize=normalize, batch_size=call["batch_size"])
        for index, (text, vector) in enumerate(zip(inputs, vectors, strict=True)):
            write(json_text({"index": index, "input": text, "embedding": vector.tolist()}))


@main.command()
@text_options()
@json_option
def classify(run: TextRun, as_json: bool) -> None:
    """Print the label of each TEXT, or of each of its tokens.

    BUNDLE is encoder-only and has a head. --json prints the logits too.
    """
    inputs = inputs_of(run.texts, run.source)
    with _opened(run, len(inputs), "classifying") as (model, write, call):
        found = model.classify(inputs, batch_size=call["batch_size"])
        for index, (text, one) in enumerate(zip(inputs, found, strict=True)):
            if as_json:
                values = {"label": one.label, "logits": one.logits.tolist(), "token_ids": one.token_ids}
                write(json_text({"index": index, "input": text, **values}))
            else:
                write(one.label if isinstance(one.label, str) else " ".join(one.label))
