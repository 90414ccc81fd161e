"""`tfexport diff`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click

from tfexport.cli.commands import EXIT_PARITY
from tfexport.cli.options import (
    INPUT,
    PATH,
    backend_option,
    device_option,
    json_option,
    threads_option,
    trusted_keys_option,
)
from tfexport.cli.terminal import inputs_of, print_result
from tfexport.contract import Device


@click.command()
@click.argument("first", type=PATH)
@click.argument("second", type=PATH)
@click.option("--corpus", type=INPUT, help="File with one text a line, which both are asked; - is standard input.")
@click.option("--num-beams", type=click.IntRange(min=1), default=1, help="Beams of beam search; 1 is greedy.")
@click.option("--batch-size", type=click.IntRange(min=1), default=32, help="Texts to run together.")
@backend_option
@device_option
@threads_option
@trusted_keys_option
@json_option
def diff(
    first: Path,
    second: Path,
    corpus: Path | None,
    num_beams: int,
    batch_size: int,
    backend: str,
    device: Device,
    threads: int | Literal["auto"],
    trusted_keys: tuple[Path, ...],
    as_json: bool,
) -> None:
    """Say what differs between the bundles FIRST and SECOND; exit with 2 when anything does.

    Compared are files, by their sha256, what the bundles say of themselves, and with --corpus what they say to its
    texts. What each brings as its own defaults of generation counts, but for beams and draws.
    """
    from tfexport.diff import diff_bundles

    found = diff_bundles(
        first,
        second,
        texts=None if corpus is None else inputs_of((), corpus),
        batch_size=batch_size,
        trusted_keys=trusted_keys or None,
        num_beams=num_beams,
        backend=backend,
        device=device,
        threads=threads,
    )
    print_result(found.to_dict(), found.lines(), as_json)
    click.get_current_context().exit(0 if found.is_same else EXIT_PARITY)
