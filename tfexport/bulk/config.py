"""Define the settings, file formats and progress of bulk runs, without pyarrow."""

import os
import re
from dataclasses import dataclass
from os import PathLike
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal, get_args

from tfexport.config import Config, Ge, Help, Le, Match
from tfexport.errors import InputError

Format = Literal[".parquet", ".jsonl", ".csv", ".tsv", ".txt"]
_Name = Annotated[str, Match("(?s:.+)", "a name")]
_LINE_BREAK = re.compile(r"\r\n?|\n")


class BulkConfig(Config, subject="bulk"):
    """Settings of a bulk run, except for decoding."""

    input_column: Annotated[
        _Name | None, Help("Column of the texts or files; by default the only one, or the one named text.")
    ] = None
    output_column: Annotated[_Name, Help("Column of the outputs; more columns begin with its name.")] = "output"
    prefix: Annotated[str | None, Help("Text that every output begins with.")] = None
    batch_size: Annotated[int, Ge(1), Help("Texts that are decoded together; does not change the outputs.")] = 32
    rows_per_part: Annotated[int, Ge(1), Le(1_000_000), Help("Rows that are saved together, up to 32 MiB.")] = 2048


@dataclass(frozen=True)
class Progress:
    """Progress of a run."""

    num_rows: int
    done: int  # including rows of earlier runs
    rows_per_s: float
    left_s: float | None  # None if the rate is unknown


@dataclass(frozen=True)
class Summary:
    """Result of a run."""

    num_rows: int
    num_decoded: int  # without rows of earlier runs
    num_errors: int  # rows with an error instead of an output
    rows_per_s: float


def format_of(name: str | PathLike[str]) -> Format | None:
    """Return the format of a path or URI, its suffix; None if it is unknown."""
    text = str(name).partition("?")[0] if "://" in str(name) else str(name)
    suffix = PurePosixPath(text).suffix.lower().replace(".ndjson", ".jsonl")
    return next((known for known in get_args(Format) if known == suffix), None)


def need_format(name: str | PathLike[str], argument: str) -> Format:
    """Return the format of a path or URI; raise `InputError` if it is unknown."""
    if (found := format_of(name)) is None:
        raise InputError(f"{argument}: its suffix is not one of {', '.join(get_args(Format))}; rename the file")
    return found


def is_bulk(*names: str | PathLike[str] | None) -> bool:
    """Return whether all names are files of a known format, not pipes or devices."""
    return all(name is not None and format_of(name) is not None and _may_be_file(name) for name in names)


def is_table(name: str | PathLike[str]) -> bool:
    """Return whether a name is a file of a format other than plain text lines."""
    return format_of(name) not in (None, ".txt") and _may_be_file(name)


def _may_be_file(name: str | PathLike[str]) -> bool:
    return "://" in str(name) or not os.path.lexists(name) or Path(name).is_file()


def answer_line(text: str, number: int | None, score: float | None) -> str:
    """Format an output as one line, with number and score if `number` is given."""
    line = _LINE_BREAK.sub(" ", text)
    return line if number is None else f"{number}\t{'' if score is None else f'{score:z.4f}'}\t{line}"
