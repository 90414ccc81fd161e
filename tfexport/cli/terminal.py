"""Read texts, and write lines, JSON and progress bars."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import click

from tfexport.cli._lines import read_lines, write_whole
from tfexport.errors import printable

_STEPS = 1000  # of a bar that shows a fraction
CLEAR_LINE = "\r\x1b[K"


def inputs_of(texts: Sequence[str], source: Path | str | None) -> list[str]:
    """Return the texts of the arguments, of a file or of standard input."""
    if texts and source:
        raise click.UsageError("TEXT and --input are both given; leave one of them out.")
    if texts:
        return list(texts)
    if source is not None and str(source) != "-":
        with Path(source).open("rb") as stream:
            return read_lines(stream, str(source))
    if sys.stdin is None:  # Python's value for a closed stream
        raise click.UsageError("No text was given, and standard input is closed; add TEXT, or --input FILE.")
    if source is None and sys.stdin.isatty():
        raise click.UsageError("No text was given; add TEXT, or --input FILE, or pipe one text a line.")
    return read_lines(sys.stdin.buffer, "standard input")


@contextmanager
def lines_to(output: Path | str | None) -> Iterator[Callable[[str], None]]:
    """Yield a function that writes a line to standard output or to a file."""
    if output is None:
        yield click.echo
    else:
        with write_whole(Path(output)) as lines:
            yield lines.append


@contextmanager
def progress(length: int, batch_size: int, label: str = "generating") -> Iterator[Callable[[int], None] | None]:
    """Show a bar on a terminal when there is more than one batch."""
    if length <= batch_size or not sys.stderr.isatty():
        yield None
    else:
        with click.progressbar(length=length, label=label, file=sys.stderr) as bar:
            yield bar.update


@contextmanager
def stage_progress() -> Iterator[tuple[Callable[[str], None], Callable[[str, float], None]]]:
    """Print lines and, on a terminal, a progress bar of each stage below them."""
    if not sys.stderr.isatty():
        yield report_line, lambda stage, done: None
        return
    with ExitStack() as shown:
        bars: dict[str, Any] = {}

        def report(line: str) -> None:
            click.echo(CLEAR_LINE if bars else "", nl=False, err=True)
            report_line(line)

        def on_progress(stage: str, done: float) -> None:
            if stage not in bars:
                shown.close()
                bars.clear()
                bar = click.progressbar(length=_STEPS, label=stage, show_eta=False, file=sys.stderr)
                bars[stage] = shown.enter_context(bar)
            bars[stage].update(int(done * _STEPS) - bars[stage].pos)

        yield report, on_progress


def report_line(line: str) -> None:
    """Print a line of progress to standard error."""
    click.echo(printable(line), err=True)


def json_text(value: Any, *, indent: int | None = None) -> str:
    """Format a value as JSON, on one line unless indented."""
    text = json.dumps(value, ensure_ascii=False, indent=indent)
    try:
        text.encode()
    except UnicodeEncodeError:  # a name that is not UTF-8
        return json.dumps(value, indent=indent)
    return text


def print_result(value: Any, lines: Sequence[str], as_json: bool) -> None:
    """Print a result for the terminal, or as JSON."""
    text = "\n".join(lines)
    click.echo(json_text(value, indent=2) if as_json else "\n".join(map(printable, text.split("\n"))))
