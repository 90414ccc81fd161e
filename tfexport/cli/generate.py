"""Define the command `generate`."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tfexport.bulk.config import BulkConfig, Progress, answer_line, is_bulk, is_table
from tfexport.cli.commands import Terminated, main
from tfexport.cli.options import TextRun, config_options, decode_options, is_given, json_option, text_options, token_ids
from tfexport.cli.terminal import CLEAR_LINE, inputs_of, json_text, lines_to, progress, report_line
from tfexport.errors import InputError

if TYPE_CHECKING:
    from tfexport.model.model import Model

EXIT_ROWS = 3  # the output is complete, but some of its rows have an error
_TERMINAL_INTERVAL_S, _LOG_INTERVAL_S = 0.2, 30.0  # between two lines of progress


@main.command()
@text_options(bulk=True)
@config_options(BulkConfig, "input_column", "output_column", "prefix")
@json_option
@decode_options
def generate(run: TextRun, as_json: bool, **options: Any) -> None:
    """Generate a text for each TEXT and print one per line.

    A model of audio or images reads the file that TEXT names. Without TEXT and --input it reads standard input. Several
    texts for one input are written as number of the input, score and text, separated by tabs. A line break inside a
    text is written as a space, except with --json.

    If --input and --output end with .parquet, .jsonl, .csv, .tsv or .txt, it works in bulk: memory is bounded, every
    column is copied, and the same command resumes a killed run. This needs the extra `bulk`.

    Options given here override the bundle's own defaults (tfexport inspect BUNDLE), which override those below.
    """
    columns = {name: options.pop(name) for name in ("input_column", "output_column", "prefix")}
    options = {name: value for name, value in options.items() if is_given(name)}
    in_bulk = not run.texts and not as_json and is_bulk(run.source, run.output)
    inputs = [] if in_bulk else _read_inputs(run)
    from tfexport.model.load import load

    with load(run.bundle, **run.loading) as model:
        if not model.spec.has_decoder:
            remedy = f"use tfexport embed {run.bundle}"
            raise InputError(f"{run.bundle}: is an encoder-only model and generates no text; {remedy}")
        options = token_ids(options, model.tokenizer.target_id if model.tokenizer else None)
        if in_bulk:
            config = BulkConfig(batch_size=run.batch_size, **columns)
            _generate_in_bulk(model, str(run.source), str(run.output), config, options)
        else:
            _generate_lines(model, inputs, run, columns["prefix"], as_json, options)


def _generate_lines(
    model: Model, inputs: Sequence[str], run: TextRun, prefix: str | None, as_json: bool, options: dict[str, Any]
) -> None:
    prefixes = None if prefix is None else [prefix] * len(inputs)
    with lines_to(run.output) as write, progress(len(inputs), run.batch_size) as tick:
        is_numbered = model.decoding(**options).num_return_sequences > 1
        options = {"return_scores": as_json or is_numbered} | options
        results = model.generate(inputs, prefixes=prefixes, batch_size=run.batch_size, on_progress=tick, **options)
        for result in results:
            if as_json:
                write(json_text({"index": result.index, "input": inputs[result.index], **dataclasses.asdict(result)}))
            else:
                write(answer_line(result.text, result.index + 1 if is_numbered else None, result.score))


def _read_inputs(run: TextRun) -> list[str]:
    """Return the texts; raise if files or options need the bulk mode."""
    source, output = run.source, run.output
    subject = ""
    if isinstance(source, str) or isinstance(output, str):
        subject = "A URI"
    elif is_given("input_column") or is_given("output_column"):
        subject = "--input-column or --output-column"
    elif source is not None and is_table(source):
        subject = f"--input {source}, whose lines are not texts,"
    if subject:
        expected = "--input and --output that end with .parquet, .jsonl, .csv, .tsv or .txt, without TEXT and --json"
        raise click.UsageError(f"{subject} needs {expected}.")
    if source and output and Path(source).is_file() and Path(output).is_file() and Path(source).samefile(output):
        raise InputError(f"{output} is also the input; choose another --output")
    return inputs_of(run.texts, source)


def _generate_in_bulk(model: Model, source: str, output: str, config: BulkConfig, options: dict[str, Any]) -> None:
    """Generate for a file; exit with 3 if rows have errors."""
    from tfexport.bulk.run import generate_file

    with _bulk_progress() as (report, on_progress):
        try:
            summary = generate_file(model, source, output, config, report=report, on_progress=on_progress, **options)
        except (KeyboardInterrupt, Terminated) as stop:
            stop.add_note("finished rows are kept; run the same command again to continue")
            raise
    decoded = f"{summary.num_decoded:,} of them decoded now at {summary.rows_per_s:,.0f} rows a second"
    report_line(f"{output}: {summary.num_rows:,} rows, {decoded}")
    if summary.num_errors:
        errors = f"{summary.num_errors:,} of {summary.num_rows:,} rows could not be decoded"
        report_line(f"{errors}; for the reasons see column {config.output_column}_error of {output}")
        click.get_current_context().exit(EXIT_ROWS)


@contextmanager
def _bulk_progress() -> Iterator[tuple[Callable[[str], None], Callable[[Progress], None]]]:
    """Update one line on a terminal; elsewhere, print a line every 30 seconds."""
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
        if now - shown_at < (_TERMINAL_INTERVAL_S if is_terminal else _LOG_INTERVAL_S):
            return
        shown_at = now
        if is_terminal:
            is_line_open = True
            click.echo(CLEAR_LINE + _progress_line(progress), nl=False, err=True)
        else:
            report_line(_progress_line(progress))

    try:
        yield report, on_progress
    finally:
        if is_line_open:
            click.echo(err=True)


def _progress_line(progress: Progress) -> str:
    share = progress.done / progress.num_rows if progress.num_rows else 1
    line = f"{progress.done:,} of {progress.num_rows:,} rows ({share:.1%}), {progress.rows_per_s:,.0f} rows/s"
    if progress.left_s is None:
        return line
    minutes, seconds = divmod(int(progress.left_s), 60)
    return f"{line}, {minutes // 60}:{minutes % 60:02}:{seconds:02} left"
