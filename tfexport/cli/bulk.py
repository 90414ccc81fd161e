"""`tfexport generate` over whole files: progress while it runs, and what came of it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from tfexport.cli.process import Terminated
from tfexport.cli.terminal import report_line

if TYPE_CHECKING:
    from tfexport.bulk.progress import Progress
    from tfexport.model.model import Model

# The output is there, and rows of it have an error; apart from what a supervisor would try again.
EXIT_ROWS = 3
# Seconds between two lines of progress, on a terminal, where the one takes the place of the other, and in a log.
_ON_TERMINAL_S, _IN_LOG_S = 0.2, 30.0


def generate_in_bulk(
    model: Model,
    source: str,
    output: str,
    input_column: str | None,
    output_column: str | None,
    prefix: str | None,
    batch_size: int,
    options: dict[str, Any],
) -> None:
    """Generate for a file, with progress on standard error; exits with 3 where rows have errors."""
    from tfexport.bulk.config import BulkConfig
    from tfexport.bulk.run import generate_file

    config = BulkConfig(
        input_column=input_column,
        output_column=BulkConfig.output_column if output_column is None else output_column,
        prefix=prefix,
        batch_size=batch_size,
    )
    with _says_how_to_go_on(), _progress() as (report, on_progress):
        summary = generate_file(model, source, output, config, report=report, on_progress=on_progress, **options)
    report_line(
        f"{output}: {summary.num_rows:,} rows, {summary.num_decoded:,} of them decoded now"
        f" at {summary.rows_per_s:,.0f} rows a second"
    )
    if summary.num_errors:
        report_line(
            f"{summary.num_errors:,} of {summary.num_rows:,} rows could not be decoded; "
            f"{output} has the reason of each in column {config.output_column}_error"
        )
        click.get_current_context().exit(EXIT_ROWS)


@contextmanager
def _progress() -> Iterator[tuple[Callable[[str], None], Callable[[Progress], None]]]:
    """Show one line that changes on a terminal, and a line now and then elsewhere."""
    is_terminal, shown_at = sys.stderr.isatty(), time.monotonic()
    is_line_open = False

    def report(line: str) -> None:
        nonlocal is_line_open
        if is_line_open:
            click.echo(err=True)
        is_line_open = False
        report_line(line)

    def on_progress(progress: Progress) -> None:
        nonlocal shown_at, is_line_open
        now = time.monotonic()
        if now - shown_at < (_ON_TERMINAL_S if is_terminal else _IN_LOG_S):
            return
        shown_at = now
        if is_terminal:
            is_line_open = True
            click.echo(f"\r\x1b[K{progress_line(progress)}", nl=False, err=True)
        else:
            report_line(progress_line(progress))

    try:
        yield report, on_progress
    finally:
        if is_line_open:
            click.echo(err=True)


def progress_line(progress: Progress) -> str:
    """Spell how far a run is: rows, rate, time left."""
    share = progress.done / progress.num_rows if progress.num_rows else 1
    line = f"{progress.done:,} of {progress.num_rows:,} rows ({share:.1%}), {progress.rows_per_s:,.0f} rows/s"
    if progress.left_s is None:
        return line
    minutes, seconds = divmod(int(progress.left_s), 60)
    return f"{line}, {minutes // 60}:{minutes % 60:02}:{seconds:02} left"


@contextmanager
def _says_how_to_go_on() -> Iterator[None]:
    try:
        yield
    except (KeyboardInterrupt, Terminated) as stop:
        stop.add_note("what is done is kept; run the same command again to go on")
        raise
