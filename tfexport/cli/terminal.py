"""Read text files strictly, and write lines, JSON and progress bars."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import click

from tfexport._io.atomic import whole_file
from tfexport._io.strict_json import parse_json
from tfexport.errors import InputError, printable, raise_all

# Limits reading from a device or an endless pipe.
MAX_BYTES = 256 * 1024 * 1024
_BOM = b"\xef\xbb\xbf"
_SHOWN = 10
_STREAM = re.compile(r"/dev/(?:std|fd/)(out|err|\d{1,4})")
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


def read_lines(stream: BinaryIO, name: str) -> list[str]:
    """Read one text per line, or raise `InputError` with every problem."""
    raw = stream.read(MAX_BYTES + 1)
    if len(raw) > MAX_BYTES:
        raise InputError(f"{name} has more than {MAX_BYTES} bytes, the limit; split it")
    rows = raw.removeprefix(_BOM).split(b"\n")
    if not rows[-1]:
        rows.pop()
    texts: list[str] = []
    empty, broken = [], []
    for number, row in enumerate(rows, 1):
        try:
            texts.append(row.removesuffix(b"\r").decode())
            if not texts[-1].strip():
                empty.append(number)
        except UnicodeDecodeError:
            broken.append(number)
    problems = [] if rows else ["has no text, expected one text per line"]
    if broken:
        problems.append(f"{_name(broken)} not UTF-8; convert the file, for example with iconv -t utf-8")
    if empty:
        problems.append(f"{_name(empty)} empty; remove them, so that input and output agree line by line")
    raise_all(InputError, name, problems)
    return texts


def split_pairs(lines: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split lines into sources and targets, or raise `InputError` with every problem."""
    pairs: list[tuple[str, str]] = []
    problems, indices = [], []
    for index, line in enumerate(lines):
        try:
            pairs.append(_pair(line))
        except ValueError as error:
            problems.append(f"pair {index + 1} {error}")
            indices.append(index)
    raise_all(InputError, "input", problems, indices=indices)
    return [source for source, _ in pairs], [target for _, target in pairs]


def _pair(line: str) -> tuple[str, str]:
    # A tab in a JSON text is escaped, so a line with a tab is never JSON.
    source, *targets = line.split("\t")
    if len(targets) == 1:
        return source, targets[0]
    if targets or not line.startswith("{"):
        raise ValueError(f"has {len(targets)} tabs, expected source, one tab and target")
    try:
        data = parse_json(line.encode())
    except ValueError as error:
        raise ValueError(f"is not JSON ({error})") from error
    texts = data.get("input"), data.get("text")
    if not isinstance(texts[0], str) or not isinstance(texts[1], str):
        raise ValueError('lacks "input" or "text", expected a text in each')
    return texts[0], texts[1]


def _name(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:_SHOWN]))
    if len(numbers) == 1:
        return f"line {shown} is"
    more = f" and {len(numbers) - _SHOWN} more" if len(numbers) > _SHOWN else ""
    return f"lines {shown}{more} are"


@contextmanager
def write_whole(path: Path) -> Iterator[list[str]]:
    """Yield a list, whose lines are written to `path` in one step at the end."""
    lines: list[str] = []
    with ExitStack() as stack:
        with _wrapped(path):
            if stream := _STREAM.fullmatch(str(path)):
                # Other processes may write to the same file, so append to it.
                descriptor = {"out": 1, "err": 2}.get(stream[1]) or int(stream[1])
                out: BinaryIO | None = stack.enter_context(open(descriptor, "wb", closefd=False))
            elif (path := Path(os.path.realpath(path))).exists() and not path.is_file():
                out = stack.enter_context(path.open("ab"))  # opened once: the reader of a pipe stops at its closing
            else:
                out, draft = None, stack.enter_context(whole_file(path))
        yield lines
        with _wrapped(path):
            raw = "".join(f"{line}\n" for line in lines).encode()
            if out is None:
                draft.write_bytes(raw)
            else:
                out.write(raw)
            stack.close()


@contextmanager
def _wrapped(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror}); choose another output") from error
