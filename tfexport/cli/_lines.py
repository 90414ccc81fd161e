"""Read text files strictly, one text per line, and write them atomically."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

from tfexport._io.atomic import whole_file
from tfexport._io.strict_json import parse_json
from tfexport.errors import InputError, raise_all

# Limits reading from a device or an endless pipe.
MAX_BYTES = 256 * 1024 * 1024
_BOM = b"\xef\xbb\xbf"
_SHOWN = 10
_STREAM = re.compile(r"/dev/(?:std|fd/)(out|err|\d{1,4})")


def read_lines(stream: BinaryIO, name: str) -> list[str]:
    """Read one text per line, without a byte order mark; errors begin with `name`.

    Raises:
        InputError: there are too many bytes or no lines, or lists all lines that are empty or not UTF-8.
    """
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
        except UnicodeDecodeError:
            broken.append(number)
        else:
            if not texts[-1].strip():
                empty.append(number)
    problems = [] if rows else ["has no text, expected one text per line"]
    if broken:
        problems.append(f"{_name(broken)} not UTF-8; convert the file, for example with iconv -t utf-8")
    if empty:
        problems.append(f"{_name(empty)} empty; remove them, so that input and output agree line by line")
    raise_all(InputError, name, problems)
    return texts


def split_pairs(lines: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split lines into sources and targets; raises InputError for invalid ones.

    A line has two texts with a tab between them, or a JSON object with "input" and "text". A tab in a JSON text is
    escaped, so a line with a tab is never JSON.
    """
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
    """Yield a list of lines, which are written to `path` in one step at the end.

    An existing file is replaced; a pipe or a device such as /dev/stdout is written to directly. Whether `path` is
    writable is checked on entry.
    """
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
