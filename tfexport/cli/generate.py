"""`tfexport generate` and `tfexport embed`: texts in, texts or vectors out."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from tfexport.cli.options import decode_options, form_option, is_given, json_option, text_options, token_ids
from tfexport.cli.terminal import inputs_of, json_text, lines_to, progress
from tfexport.errors import InputError
from tfexport.spec import Device, Form

if TYPE_CHECKING:
    from tfexport.model import Pooling


@click.command()
@text_options
@form_option
@click.option("--prefix", help="Text that every output begins with.")
@json_option
@decode_options
def generate(
    bundle: Path,
    texts: tuple[str, ...],
    source: Path | None,
    output: Path | None,
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

    What a bundle brings as its own defaults (tfexport inspect BUNDLE) goes before the defaults below, and what is
    given here before both.
    """
    given = {name: value for name, value in decode.items() if is_given(name)}
    inputs = inputs_of(texts, source)
    from tfexport.model import load

    prefixes = None if prefix is None else [prefix] * len(inputs)
    with (
        load(
            bundle,
            backend=backend,
            form=form,
            threads=threads,
            device=device,
            engine=engine,
            trusted_keys=trusted_keys or None,
        ) as model,
        lines_to(output) as write,
        progress(len(inputs), batch_size) as tick,
    ):
        if not model.spec.has_decoder:
            raise InputError(f"{bundle}: is an encoder alone and generates no text; use tfexport embed {bundle}")
        given = token_ids(given, model.tokenizer.target_id if model.tokenizer else None)
        count = model.decoding(**given).num_return_sequences
        results = model.generate(inputs, prefixes=prefixes, batch_size=batch_size, on_progress=tick, **given)
        for result in results:
            if as_json:
                write(json_text({"index": result.index, "input": inputs[result.index], **dataclasses.asdict(result)}))
            else:
                text = " ".join(result.text.splitlines())
                write(text if count == 1 else f"{result.index + 1}\t{result.score:z.4f}\t{text}")


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
    from tfexport.model import load

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
