#!/usr/bin/env python
"""What narrow weights cost in quality, on a task that can be made here: phrases translated between ten languages.

`train` makes a corpus with Babel, a byte-level BPE vocabulary and a model, on one thread; interrupted, it goes on
from its last checkpoint when the same command is run again. `measure` exports a model in each precision, decodes
phrases that training never saw, or the held-out dates of models/dates, and prints a table in Markdown. It needs
`pip install sacrebleu` besides `pip install -e .[export,cpu,dev]`.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path

import click
import torch
from phrases.comparison import BUNDLES, Text, compare, report
from phrases.training import held_out, save, train

import tfexport
from tfexport.export import export_bundle
from tfexport.export.config import ExportConfig

DATES = Path(__file__).resolve().parent.parent / "models" / "dates"


@click.group(help=__doc__)
def main() -> None: ...


@main.command("train")
@click.option("--output", type=click.Path(path_type=Path), default=Path("build/phrases"), show_default=True)
@click.option("--steps", type=click.IntRange(min=1), default=2400, show_default=True)
@click.option("--batch-size", type=click.IntRange(min=1), default=64, show_default=True)
@click.option("--learning-rate", "peak", default=1.5e-3, show_default=True)
@click.option("--seed", default=0, show_default=True)
def train_command(output: Path, steps: int, batch_size: int, peak: float, seed: int) -> None:
    """Train the model of phrases, or go on with it; about 28 minutes of a core that multiplies in bfloat16."""
    torch.set_num_threads(1)
    model, _, minutes = train(output, steps, batch_size, peak, seed, click.echo)
    save(output, model)
    count = sum(p.numel() for p in model.parameters())
    click.echo(f"{output}: {count:,} parameters, {minutes:.0f} minutes of the processor")


@main.command("measure")
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.option("--texts", type=click.IntRange(min=100), default=2000, show_default=True, help="Decoded by each bundle.")
@click.option(
    "--alone", type=click.IntRange(min=1), default=400, show_default=True, help="Of those, by themselves too."
)
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True, help="Parts of the texts.")
@click.option("--seed", default=0, show_default=True, help="Of the phrases.")
def measure_command(model: Path, texts: int, alone: int, rounds: int, seed: int) -> None:
    """Compare the precisions of MODEL, what `train` made or models/dates, and print a table."""
    if model.resolve() == DATES:
        lines = (DATES / "heldout.tsv").read_text("utf-8").splitlines()[:texts]
        chosen = [Text(*line.split("\t")[:2]) for line in lines]
    else:
        chosen = [Text(pair.source, pair.target) for pair in held_out(texts, seed)]
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="quality-")))
        loaded = {}
        for name, options in BUNDLES.items():
            export_bundle(str(model), work / name, ExportConfig(variants=("contrib",), **options), verify=False)
            loaded[name] = stack.enter_context(tfexport.load(work / name, threads=1))
        sizes = {name: sum(p.stat().st_size for p in (work / name).rglob("*") if p.is_file()) for name in BUNDLES}
        found = compare(loaded, chosen, alone=alone, rounds=rounds)
    click.echo(report(found, sizes, [text.reference for text in chosen]))


if __name__ == "__main__":
    main()
