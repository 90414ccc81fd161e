"""`tfexport generate` and `tfexport embed`: texts in, texts or vectors out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from tfexport.cli.bulk import generate_in_bulk
from tfexport.cli.options import (
    bulk_options,
    decode_options,
    form_option,
    is_given,
    json_option,
    text_options,
    token_ids,
)
from tfexport.cli.terminal import inputs_of, json_text, lines_to, progress
from tfexport.contract import Device, Form
from tfexport.errors import InputError

if TYPE_CHECKING:
    from tfexport.model.model import Model, Pooling


@click.command()
@bulk_options
@form_option
@click.option("--prefix", help="Text that every output begins with.")
@json_option
@decode_options
def generate(
    bundle: Path,
    texts: tuple[str, ...],
    source: Path | str | None,
    output: Path | str | None,
    input_column: str | None,
    output_column: str | None,
    backend: str,
    engine: str | None,
    device: Device,
    threads: int | Literal["auto"],
    trusted_keys: tuple[Path, ...],
    form: Form | None,
    batch_size: int,
    prefix: str | None,
    as_json: bool,
    **decode: Any,
) -> None:
    """Write what the model answers to each TEXT, one a line.

    Without TEXT and --input it reads standard input. Several texts for one input are written as number of the
    input, score and text, separated by tabs. A line break inside a text is written as a space, except with --json.

    With --input and --output of .parquet, .jsonl, .csv or .txt it works in bulk: in memory that does not grow, every
    column carried along, and the same command goes on where a killed one ended.

    What a bundle brings as its own defaults (tfexport inspect BUNDLE) goes before the defaults below, and what is
    given here before both.
    """
    given = {name: value for name, value in decode.items() if is_given(name)}
    from tfexport.bulk.formats.registry import is_bulk

    in_bulk = not texts and not as_json and is_bulk(source, output)
    if not in_bulk:
        plain = _plain_files(source, output, input_column, output_column)
        inputs = inputs_of(texts, plain[0])
    from tfexport.model.load import load

    with load(
        bundle,
        backend=backend,
        form=form,
        threads=threads,
        device=device,
        engine=engine,
        trusted_keys=trusted_keys or None,
    ) as model:
        if not model.spec.has_decoder:
            raise InputError(f"{bundle}: is an encoder alone and generates no text; use tfexport embed {bundle}")
        given = token_ids(given, model.tokenizer.target_id if model.tokenizer else None)
        if in_bulk:
            columns = (input_column, output_column)
            generate_in_bulk(model, str(source), str(output), *columns, prefix, batch_size, given)
        else:
            _generate_plainly(model, inputs, plain[1], prefix, batch_size, as_json, given)


def _generate_plainly(
    model: Model,
    inputs: Sequence[str],
    output: Path | None,
    prefix: str | None,
    batch_size: int,
    as_json: bool,
    options: dict[str, Any],
) -> None:
    """Generate for texts in one call, and write what comes of it."""
    from tfexport.bulk.formats.lines import answer_line

    prefixes = None if prefix is None else [prefix] * len(inputs)
    with lines_to(output) as write, progress(len(inputs), batch_size) as tick:
        is_numbered = model.decoding(**options).num_return_sequences > 1
        results = model.generate(inputs, prefixes=prefixes, batch_size=batch_size, on_progress=tick, **options)
        for result in results:
            if as_json:
                write(json_text({"index": result.index, "input": inputs[result.index], **dataclasses.asdict(result)}))
            else:
                write(answer_line(result.text, result.index + 1 if is_numbered else None, result.score))


def _plain_files(
    source: Path | str | None, output: Path | str | None, *columns: str | None
) -> tuple[Path | None, Path | None]:
    """Refuse what works in bulk alone."""
    from tfexport.bulk.formats.registry import is_table

    what = None
    if any(isinstance(given, str) for given in (source, output)):
        what = "A URI"
    elif any(column is not None for column in columns):
        what = "--input-column and --output-column"
    elif source is not None and is_table(source):
        what = f"--input {source}, whose lines are no texts,"
    if what:
        raise click.UsageError(
            f"{what} needs --input and --output with names that end with .parquet, .jsonl, .csv or .txt, "
            "without TEXT and --json."
        )
    assert not isinstance(source, str)
    assert not isinstance(output, str)
    return source, output


@click.command()
@text_options
@click.option("--pooling", type=click.Choice(["mean", "cls"]), default="mean", help="How tokens become one vector.")
@click.option("--normalize/--no-normalize", default=True, help="Scale every vector to length 1.")
def embed(
    bundle: Path,
    texts: tuple[str, ...],
    source: Path | None,
    output: Path | None,
    backend: str,
    engine: str | None,
    device: Device,
    threads: int | Literal["auto"],
    trusted_keys: tuple[Path, ...],
    batch_size: int,
    pooling: Pooling,
    normalize: bool,
) -> None:
    """Write the vector of each TEXT with an encoder-only bundle, one JSON object a line."""
    inputs = inputs_of(texts, source)
    from tfexport.model.load import load

    with (
        load(
            bundle,
            backend=backend,
            threads=threads,
            device=device,
            engine=engine,
            trusted_keys=trusted_keys or None,
        ) as model,
        lines_to(output) as write,
    ):
        vectors = model.embed(inputs, pooling=pooling, normalize=normalize, batch_size=batch_size)
        for index, (text, vector) in enumerate(zip(inputs, vectors, strict=True)):
            write(json_text({"index": index, "input": text, "embedding": vector.tolist()}))
