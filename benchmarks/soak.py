#!/usr/bin/env python
"""Decode many sequences in one process, and see whether memory stays flat and outputs stay the same.

The first 1,000 sequences, of mixed lengths, in batches of mixed sizes, greedy
and with 4 beams, are decoded again and again in another order of batches. The
exit code is 1 when the process holds over 5 % and 5 MB more at the end than
after the first 1,000, or a batch says something else than at first. Linux alone.
"""

from __future__ import annotations

import random
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import click
from comparison.systems import FIRST_TOKEN, MODELS, OURS, PRECISIONS, Variant
from comparison.weights import ConvertedWeights

import tfexport
from tfexport.errors import TfexportError

PASS = 1_000
MAX_LENGTH, MAX_BATCH = 64, 32
# Memory may grow by so much, since the order of batches decides how blocks fit together.
GROWTH, GROWTH_BYTES = 0.05, 5e6


@dataclass(frozen=True)
class Batch:
    """Sources decoded together, and how."""

    sources: tuple[tuple[int, ...], ...]
    num_beams: int
    new_tokens: int


def batches(num_sequences: int, vocab: int) -> list[Batch]:
    """Draw batches of `num_sequences` in all, the same on every call."""
    draw, found, left = random.Random(0), [], num_sequences
    while left:
        size = min(left, draw.randint(1, MAX_BATCH))
        sources = tuple(
            tuple(draw.randrange(FIRST_TOKEN, vocab) for _ in range(draw.randint(1, MAX_LENGTH))) for _ in range(size)
        )
        found.append(Batch(sources, draw.choice((1, 4)), draw.randint(1, MAX_LENGTH)))
        left -= size
    return found


def decode(model: tfexport.Model, batch: Batch) -> list[tuple[int, ...]]:
    """Return the best hypothesis of each source."""
    found = model.generate_ids(
        batch.sources, batch_size=MAX_BATCH, num_beams=batch.num_beams, max_new_tokens=batch.new_tokens
    )
    return [hypotheses[0].token_ids for hypotheses in found]


def resident_bytes() -> int:
    """Return the memory that this process holds now."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))


def soak(model: tfexport.Model, num_sequences: int, per_pass: int = PASS) -> list[str]:
    """Decode pass after pass and print the memory after each.

    Args:
        model: loaded.
        num_sequences: in all, a multiple of `per_pass`.
        per_pass: different sequences.

    Returns:
        What is wrong; empty when all is well.
    """
    work = batches(per_pass, model.spec.source_vocab)
    expected = [decode(model, batch) for batch in work]
    first = last = resident_bytes()
    click.echo(f"{per_pass:,} sequences: {first / 1e6:.1f} MB")
    differing = set()
    for number in range(2, num_sequences // per_pass + 1):
        order = list(range(len(work)))
        random.Random(number).shuffle(order)
        differing |= {index for index in order if decode(model, work[index]) != expected[index]}
        last = resident_bytes()
        click.echo(f"{number * per_pass:,} sequences: {last / 1e6:.1f} MB")
    problems = [f"{len(differing)} of {len(work)} batches did not decode as at first"] if differing else []
    if last > (1 + GROWTH) * first + GROWTH_BYTES:
        problems.append(f"memory grew from {first / 1e6:.1f} to {last / 1e6:.1f} MB")
    return problems


@click.command(help=__doc__)
@click.option("--model", "name", type=click.Choice(MODELS), default=MODELS[0], show_default=True, help="Whose weights.")
@click.option("--precision", type=click.Choice(PRECISIONS), default="fp32", show_default=True, help="Of the bundle.")
@click.option("--sequences", type=click.IntRange(min=2 * PASS), default=10 * PASS, show_default=True,
              help="To decode in all, in thousands.")  # fmt: skip
@click.option("--work", type=click.Path(path_type=Path), help="Keep the bundle here, and use one that is there.")
def main(name: str, precision: str, sequences: int, work: Path | None) -> None:
    bundle = Variant(system=OURS, precision=precision, optimize_for=None if precision == "fp32" else "latency")
    with ExitStack() as stack:
        try:
            folder = work or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-")))
            path = ConvertedWeights(folder, {OURS: Path(sys.executable)}).prepared(name, bundle)
            with tfexport.load(path) as model:
                problems = soak(model, sequences)
        except TfexportError as error:
            raise click.ClickException(str(error)) from error
    if problems:
        raise click.ClickException("; ".join(problems))
    click.echo("memory flat, outputs as at first")


if __name__ == "__main__":
    main()
