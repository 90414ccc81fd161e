#!/usr/bin/env python
"""Measure a decoder's step on a GPU: ONNX Runtime, eager PyTorch, torch.compile and engines, on the same weights.

Outputs are compared before times. Then all take turns, each in a process of its
own; a trace says how long the device works in a step and how long it waits.
What fails, or takes longer than --limit, is reported with its reason, and the
rest goes on. The files gpu.json and gpu.md are written after every cell, and
--resume goes on with them. --device cpu is a dry run.
"""

from __future__ import annotations

import tempfile
import time
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path

import click
from side_by_side import Several, several
from stepwise.cells import DEVICES, PRECISIONS, Device, matrix
from stepwise.contenders import CONTENDERS
from stepwise.markdown import render
from stepwise.pool import Pool
from stepwise.result import Result
from stepwise.rounds import measure

from tfexport.errors import TfexportError
from tfexport.models.presets import PRESETS
from tfexport.spec import Precision

MODELS, BATCHES = ("paper-base", "paper-big"), (1, 8, 32, 128)


@click.command(help=__doc__)
@click.option(
    "--output", type=click.Path(path_type=Path), required=True, help="Folder to write gpu.json and gpu.md to."
)
@click.option("--device", type=click.Choice(DEVICES), default="cuda", show_default=True, help="To measure.")
@click.option("--models", type=Several(click.Choice(PRESETS)), default=",".join(MODELS), show_default=True,
              help="Presets.")  # fmt: skip
@several("--precision", PRECISIONS, "Of weights and activations.")
@several("--batch-size", (), "Sources at once.", BATCHES)
@several("--contenders", tuple(CONTENDERS), "Who takes part.")
@click.option("--rounds", type=click.IntRange(min=1), default=7, show_default=True, help="Turns of each.")
@click.option("--limit", type=click.FloatRange(min=0, min_open=True), default=180.0, show_default=True,
              metavar="SECONDS", help="That opening, a decode or a trace may take.")  # fmt: skip
@click.option("--minutes", type=click.FloatRange(min=0), help="No cell begins later.")
@click.option("--work", type=click.Path(path_type=Path), help="Keep bundles and engines here, and use those there as "
              "they are. Without it they go when the run ends.")  # fmt: skip
@click.option("--resume", is_flag=True, help="Go on with the files where a run has ended.")
def main(
    output: Path, device: Device, models: list[str], precision: list[Precision], batch_size: list[int],
    contenders: list[str], rounds: int, limit: float, minutes: float | None, work: Path | None, resume: bool,
) -> None:  # fmt: skip
    began = time.monotonic()
    options = {
        "models": models,
        "precision": precision,
        "batch_size": batch_size,
        "contenders": contenders,
        "rounds": rounds,
    }
    cells = matrix(models, precision, batch_size)
    with ExitStack() as stack:
        try:
            result = Result(output / "gpu.json", options, device, resume=resume)
        except TfexportError as error:
            raise click.ClickException(str(error)) from error
        folder = work or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpu-")))
        missing = [cell for cell in cells if not result.has(cell)]
        for (model, kind), group in groupby(missing, lambda cell: (cell.model, cell.precision)):
            opening = {
                "model": model,
                "precision": kind,
                "device": device,
                "max_batch": max(batch_size),
                "work": str(folder.resolve()),
            }
            pool = Pool(opening, limit)
            stack.callback(pool.close)
            for cell in group:
                if minutes is not None and time.monotonic() - began >= 60 * minutes:
                    click.echo(f"{minutes:g} minutes are over; go on with --resume", err=True)
                    return
                measured = measure(cell, contenders, pool, rounds=rounds, pauses=device == "cpu")
                result.add(measured)
                (output / "gpu.md").write_text(render(result.document) + "\n", encoding="utf-8")
                steps = (f"{run['contender']} {run['step_ms']:.3f} ms" for run in measured["runs"])
                click.echo(f"{cell}: {', '.join(steps) or 'nobody'}", err=True)
            pool.close()
    click.echo(render(result.document))


if __name__ == "__main__":
    main()
