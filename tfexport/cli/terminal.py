"""What goes in and out: texts, lines, JSON and bars."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from tfexport.errors import printable


def inputs_of(texts: Sequence[str], source: Path | None) -> list[str]:
    """Take the texts of the arguments, of a file or of standard input."""
    from tfexport.files.text import read_lines

    if texts and source:
        raise click.UsageError("TEXT and --input were both given; choose one.")
    if texts:
        return list(texts)
    if source is None and sys.stdin.isatty():
        raise click.UsageError("No text was given; add TEXT, or --input FILE, or pipe one text a line.")
    if source is None or str(source) == "-":
        return read_lines(sys.stdin.buffer, "standard input")
    with source.open("rb") as stream:
        return read_lines(stream, str(source))


@contextmanager
def lines_to(output: Path | None) -> Iterator[Callable[[str], None]]:
    """Yield what writes a line, to standard output or to a file that is written whole or not at all."""
    from tfexport.files.text import write_whole

    if output is None:
        yield click.echo
    else:
        with write_whole(output) as lines:
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
def build_progress() -> Iterator[tuple[Callable[[str], None], Callable[[float], None]]]:
    """Show a bar on a terminal, and lines elsewhere."""
    if not sys.stderr.isatty():
        yield report_line, lambda done: None
        return
    steps = 1000
    with click.progressbar(length=steps, label="preparing", file=sys.stderr) as bar:

        def report(line: str) -> None:
            bar.label = printable(line)
            bar.render_progress()

        yield report, lambda done: bar.update(int(done * steps) - bar.pos)


def report_line(line: str) -> None:
    """Tell what happens, beside the results."""
    click.echo(printable(line), err=True)


def json_text(value: Any) -> str:
    """Spell a value as JSON in one line."""
    return json.dumps(value, ensure_ascii=False)


def print_result(value: Any, lines: Sequence[str], as_json: bool) -> None:
    """Print a result for the terminal, or as JSON."""
    click.echo(json.dumps(value, ensure_ascii=False, indent=2) if as_json else "\n".join(lines))
