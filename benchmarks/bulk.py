#!/usr/bin/env python
"""Decode the same dates in bulk and in plain loops over lists, in turns, in one process.

Every way has to give the same texts. Seconds are those of the clock; those of
the processor stand beside them, for a machine that others use too. The table
is Markdown.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import click
import numpy as np
import pyarrow
from pyarrow import parquet

import tfexport
from tfexport.bulk.run import generate_file

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
from dates_corpus import draw, formats

HEAD = """| way | rows a second | processor seconds | of those, beside one call (lowest to highest round) |
| --- | --- | --- | --- |"""
ONE_CALL = "one call over a list of all"


def loop(model: tfexport.Model, texts: Sequence[str], size: int) -> list[str]:
    """Call the model with a list of so many texts again and again."""
    found = []
    for first in range(0, len(texts), size):
        found += [result.text for result in model.generate(texts[first : first + size])]
    return found


def in_bulk(model: tfexport.Model, source: Path) -> list[str]:
    """Decode a file, and read what was written."""
    target = source.with_name(f"out{source.suffix}")
    generate_file(model, source, target)
    if target.suffix == ".parquet":
        return [str(text) for text in parquet.read_table(target)["output"].to_pylist()]
    return [json.loads(line)["output"] for line in target.read_text().splitlines()]


def ways(model: tfexport.Model, texts: Sequence[str], folder: Path) -> dict[str, Callable[[], list[str]]]:
    """Write the texts to files, and return what is measured by its name."""
    jsonl, table = folder / "in.jsonl", folder / "in.parquet"
    jsonl.write_text("".join(json.dumps({"id": row, "text": text}) + "\n" for row, text in enumerate(texts)))
    parquet.write_table(pyarrow.table({"id": range(len(texts)), "text": texts}), table)
    return {
        ONE_CALL: lambda: loop(model, texts, len(texts)),
        "calls with lists of 32": lambda: loop(model, texts, 32),
        "calls with lists of 1": lambda: loop(model, texts[: len(texts) // 10], 1),
        "bulk, .jsonl": lambda: in_bulk(model, jsonl),
        "bulk, .parquet": lambda: in_bulk(model, table),
    }


@click.command()
@click.option("--bundle", type=click.Path(path_type=Path), required=True, help="Of models/dates.")
@click.option("--rows", type=click.IntRange(min=100), default=20_000)
@click.option("--rounds", type=click.IntRange(min=1), default=3)
def main(bundle: Path, rows: int, rounds: int) -> None:
    """Measure and print a table."""
    rng = np.random.default_rng(7)
    texts = [draw(rng, tuple(formats()), held_out_dates=False).text for _ in range(rows)]
    with tfexport.load(bundle) as model, tempfile.TemporaryDirectory() as folder:
        timed = ways(model, texts, Path(folder))
        expected = loop(model, texts, len(texts))
        rates: dict[str, list[float]] = {name: [] for name in timed}
        processor: dict[str, list[float]] = {name: [] for name in timed}
        for _ in range(rounds):
            for name, way in timed.items():
                clock, used = time.perf_counter(), time.process_time()
                found = way()
                rates[name].append(len(found) / (time.perf_counter() - clock))
                processor[name].append((time.process_time() - used) * rows / len(found))
                if found != expected[: len(found)]:
                    raise SystemExit(f"{name}: other texts than {ONE_CALL}")
    print(HEAD)
    for name in timed:
        ratios = sorted(a / b for a, b in zip(processor[name], processor[ONE_CALL], strict=True))
        print(
            f"| {name} | {np.median(rates[name]):,.0f} | {np.median(processor[name]):.1f} "
            f"| {np.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) |"
        )


if __name__ == "__main__":
    main()
