"""`tfexport align`: pairs of texts in, out what the tokens of each target were read from."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

import click

from tfexport.cli.options import form_option, json_option, text_options
from tfexport.cli.terminal import inputs_of, json_text, lines_to, progress
from tfexport.contract import Device, Form


@click.command()
@text_options
@form_option
@json_option
def align(
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
    as_json: bool,
) -> None:
    """Write which source token each target token of each TEXT was read from, as 0-0 1-2: source and target, from 0.

    A TEXT is a source and a target with a tab between them, or a JSON object with "input" and "text", such as
    tfexport generate --json writes. Without TEXT and --input it reads standard input, one pair a line. With --json the
    tokens and all weights are written. The bundle must have been exported with --alignment.
    """
    from tfexport._io.text import split_pairs

    sources, targets = split_pairs(inputs_of(texts, source))
    from tfexport.model.load import load

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
        progress(len(sources), batch_size, "aligning") as tick,
    ):
        found = model.align(sources, targets, batch_size=batch_size, on_progress=tick)
        for index, (text, target, one) in enumerate(zip(sources, targets, found, strict=True)):
            if as_json:
                values = {**dataclasses.asdict(one), "weights": one.weights.tolist()}
                write(json_text({"index": index, "input": text, "text": target, **values}))
            else:
                write(" ".join(f"{place}-{number}" for number, place in enumerate(one.source_positions)))
