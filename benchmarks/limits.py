#!/usr/bin/env python
"""Say how near a step of each bundle is to what this machine can do, and where the rest of its time goes.

A step can be no faster than its matrix products take alone, with the same
operators, weights and shapes, nor than its weights can be read from memory; and
its attention reads keys and values between them. The share is that of the
larger of the first two and of the third in the step. Products are measured in
turns with the step, memory in the same process. The operators' times are those
of ONNX Runtime's profile, whose sum is a little more than a step. The bundles
need the contrib variant. The table is Markdown.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
from bounds.caches import cache_bytes
from bounds.operators import FILLED, operator_times
from bounds.products import bare_products
from timing import Effort, interleaved, median, memory_bandwidth, repeat, stopwatch

import tfexport
from tfexport.bench.machine import environment
from tfexport.bundle.bundle import Bundle, open_bundle
from tfexport.errors import TfexportError
from tfexport.runtime.cpu import available_cores, step_weight_bytes
from tfexport.runtime.session import Session
from tfexport.runtime.sources import pad_sources

TURN = Effort(warm_up=1, least_runs=3, least_s=0.05)
# Texts begin anew here, so that on average as many tokens are in the cache as in the profile.
MOST_TOKENS = 2 * FILLED
KINDS = ("products", "attention", "selection", "norms", "rounding", "other")
COLUMNS = (
    "bundle",
    "beams",
    "batch",
    "source",
    "step, ms",
    "products alone",
    "weights alone",
    "caches alone",
    "share",
    *KINDS,
)
HEAD = f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}"


@dataclass(frozen=True)
class Cell:
    """What is decoded: sources of so many tokens, each with its beams."""

    beams: int
    sources: int
    source_length: int


def measure(bundle: Bundle, session: Session, cell: Cell, rounds: int, threads: int) -> str:
    """Measure a cell and return its row of the table."""
    entry = bundle.manifest.graphs["decoder_contrib"]
    rows = cell.sources * cell.beams
    read = step_weight_bytes(bundle) or 0
    steps = Steps(session, cell)
    runs = {"step": steps.run, "products": bare_products(bundle.file(entry.file), rows, threads)}
    seconds: dict[str, list[list[float]]] = {name: [] for name in runs}
    for _, name in interleaved(list(runs), rounds):
        seconds[name].append(repeat(stopwatch(runs[name]), TURN))
    kept = cache_bytes(
        entry.spec, sources=cell.sources, beams=cell.beams, source_length=cell.source_length, filled=FILLED
    )
    bandwidth = memory_bandwidth(read + kept, threads)
    weights, caches = read / bandwidth, kept / bandwidth
    step, products = (median(seconds[name]) for name in runs)
    times = operator_times(
        bundle.file(entry.file), entry.spec, sources=cell.sources, beams=cell.beams,
        source_length=cell.source_length, threads=threads,
    )  # fmt: skip
    numbers = [f"{1000 * time:.2f}" for time in (step, products, weights, caches)]
    numbers += [f"{(max(products, weights) + caches) / step:.0%}", *(f"{times[kind]:.2f}" for kind in KINDS)]
    return f"| {bundle.path.name} | {cell.beams} | {cell.sources} | {cell.source_length} | {' | '.join(numbers)} |"


class Steps:
    """Steps of a batch, which begins anew where its texts have grown long."""

    def __init__(self, session: Session, cell: Cell) -> None:
        rng = np.random.default_rng(0)
        ids = rng.integers(4, session.spec.source_vocab, (cell.sources, cell.source_length))
        self._source = pad_sources(session.spec.source, ids.tolist())
        self._session, self._cell = session, cell
        self._longest = min(MOST_TOKENS, session.spec.max_target_length)
        self._begin()

    def _begin(self) -> None:
        self._batch = self._session.batch(self._cell.beams)
        prompts = [[self._session.spec.tokens.start]] * self._cell.sources
        self._batch.add(self._source, prompts)
        self._tokens = np.full(self._cell.sources * self._cell.beams, 4)

    def run(self) -> None:
        """Take a step."""
        if self._batch.lengths[0] + 1 >= self._longest:
            self._begin()
        self._batch.step(self._tokens, 2 * self._cell.beams if self._cell.beams > 1 else 1)


def table(bundles: Sequence[Path], cells: Sequence[Cell], rounds: int, threads: int) -> Iterator[str]:
    """Measure every cell of every bundle, a line at a time."""
    machine = environment(threads)
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    where = f"{machine['cpu']}, {threads} of {machine['cores']} cores, {machine['date'][:10]}"
    yield f"{where}; {versions}; {rounds} rounds.\n"
    yield HEAD
    for path in bundles:
        model = tfexport.load(path, threads=threads)
        for cell in cells:
            yield measure(open_bundle(path), model.session, cell, rounds, threads)
        model.close()


def _numbers(_: click.Context, __: click.Parameter, text: str) -> list[int]:
    try:
        numbers = [int(number) for number in text.split(",")]
    except ValueError:
        numbers = [0]
    if min(numbers) < 1:
        raise click.BadParameter(f"{text} is no list of numbers from 1 on, such as 1,8,32")
    return numbers


@click.command(help=__doc__)
@click.argument("bundles", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--batch-size", default="1,4,8,16,32,64", show_default=True, callback=_numbers, help="Sources.")
@click.option("--num-beams", default="1,4", show_default=True, callback=_numbers, help="Rows of each.")
@click.option("--source-length", default="32", show_default=True, callback=_numbers, help="Tokens.")
@click.option("--rounds", type=click.IntRange(min=1), default=7, show_default=True, help="Turns of each.")
@click.option("--threads", type=click.IntRange(min=1), default=available_cores(), help="Of the CPU; all cores.")
def main(
    bundles: tuple[Path, ...], batch_size: list[int], num_beams: list[int], source_length: list[int], rounds: int,
    threads: int,
) -> None:  # fmt: skip
    cells = list(itertools.starmap(Cell, itertools.product(num_beams, batch_size, source_length)))
    try:
        for line in table(bundles, cells, rounds, threads):
            click.echo(line)
    except TfexportError as error:
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    main()
