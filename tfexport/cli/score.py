"""`tfexport score`: pairs of texts in, log-probabilities out."""

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
@click.option("--add-eos/--no-add-eos", default=True, help="Score the end token behind each target too.")
@json_option
def score(
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
    add_eos: bool,
    as_json: bool,
) -> None:
    """Write how probable the target of each TEXT is for its source: the sum of log p of its tokens.

    A TEXT is a source and a target with a tab between them, or a JSON object with "input" and "text", such as
    tfexport generate --json writes. Without TEXT and --input it reads standard input, one pair a line.
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
        progress(len(sources), batch_size, "scoring") as tick,
    ):
        scores = model.score(sources, targets, add_eos=add_eos, batch_size=batch_size, on_progress=tick)
        for index, (text, target, one) in enumerate(zip(sources, targets, scores, strict=True)):
            if as_json:
                write(json_text({"index": index, "input": text, "text": target, **dataclasses.asdict(one)}))
            else:
                write(f"{one.log_prob:z.4f}")
