"""Define the settings, file formats and progress of bulk runs, without pyarrow."""

import os
import re
from dataclasses import dataclass
from os import PathLike
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal, get_args

from tfexport.config import Config, Ge, Le, Match
from tfexport.errors import InputError

Format = Literal[".parquet", ".jsonl", ".csv", ".tsv", ".txt"]
_Name = Annotated[str, Match("(?s:.+)", "a name")]
_LINE_BREAK = re.compile(r"\r\n?|\n")


class BulkConfig(Config, subject="bulk"):
    """Settings of a bulk run, except for decoding.

    Attributes:
        input_column: column with the texts; None for the only text column, or the one named "text".
        output_column: column for the outputs; also the prefix of the names of three more columns.
        prefix: text that every output starts with; None for no prefix.
        batch_size: number of texts that are decoded together; it does not change the outputs.
        rows_per_part: number of rows that are decoded and saved together; a part has fewer rows if they exceed 32 MiB.
    """

    input_column: _Name | None = None
    output_column: _Name = "output"
    prefix: str | None = None
    batch_size: Annotated[int, Ge(1)] = 32
    rows_per_part: Annotated[int, Ge(1), Le(1_000_000)] = 2048


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


def answer_line(text: str, number: int | None, score: float) -> str:
    """Format an output as one line, with number and score if `number` is given."""
    line = _LINE_BREAK.sub(" ", text)
    return line if number is None else f"{number}\t{score:z.4f}\t{line}"
