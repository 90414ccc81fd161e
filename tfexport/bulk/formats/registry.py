"""Which format a name means, and what reads and writes it."""

from __future__ import annotations

import os
from collections.abc import Callable
from os import PathLike
from pathlib import Path, PurePosixPath
from typing import BinaryIO, get_args

from tfexport.bulk.formats.answer import AnswerColumns
from tfexport.bulk.formats.cells import CellSink, CellSource
from tfexport.bulk.formats.format import Format, Scan, Sink, Source
from tfexport.bulk.formats.lines import LineSink, LineSource
from tfexport.bulk.formats.objects import ObjectSink, ObjectSource
from tfexport.bulk.places.place import Place
from tfexport.errors import InputError


def format_of(given: str | PathLike[str]) -> Format | None:
    """Return the format that a name means by its suffix, None for none; what follows ? in a URI does not count."""
    name = str(given).partition("?")[0] if "://" in str(given) else str(given)
    suffix = PurePosixPath(name).suffix.lower().replace(".ndjson", ".jsonl")
    return next((known for known in get_args(Format) if known == suffix), None)


def is_bulk(*names: str | PathLike[str] | None) -> bool:
    """Say whether all names are of files that can be read and written in bulk; pipes and devices cannot."""
    return all(name is not None and format_of(name) is not None and _may_be_file(name) for name in names)


def is_table(name: str | PathLike[str]) -> bool:
    """Say whether a name is that of a file whose lines are no texts."""
    return format_of(name) not in (None, ".txt") and _may_be_file(name)


def _may_be_file(name: str | PathLike[str]) -> bool:
    return "://" in str(name) or not os.path.lexists(name) or Path(name).is_file()


def need_format(given: str | PathLike[str], name: str) -> Format:
    """Return the format that a name means.

    Raises:
        InputError: it means none.
    """
    found = format_of(given)
    if found is None:
        raise InputError(f"{name}: its suffix says no format, expected {', '.join(get_args(Format))}; rename it")
    return found


def open_source(place: Place, form: Format) -> Source:
    """Return what reads a file."""
    if form == ".parquet":
        from tfexport.bulk.formats.columns import ColumnSource

        return ColumnSource(place)
    if form == ".jsonl":
        return ObjectSource(place)
    return CellSource(place) if form == ".csv" else LineSource(place)


def sink_of(form: Format, source: Source, scan: Scan, answers: AnswerColumns) -> Callable[[BinaryIO], Sink]:
    """Return what opens a writer on a stream, once all that can be known before is checked.

    Args:
        form: to write.
        source: whose rows are carried along.
        scan: of it.
        answers: columns behind those of the source.

    Raises:
        InputError: the format cannot hold the rows or the answers.
    """
    if form == ".txt":
        return lambda stream: LineSink(stream, are_lists=answers.are_lists)
    answers.check(scan.columns, source.place.name)
    if form == ".parquet":
        from tfexport.bulk.formats.columns import column_sink

        return column_sink(source, scan, answers)
    source.check_spelled(form)
    if form == ".jsonl":
        return lambda stream: ObjectSink(stream, answers)
    if answers.are_lists:
        raise InputError("num_return_sequences is above 1, and a cell of .csv holds one text; write .jsonl")
    return lambda stream: CellSink(stream, list(scan.columns), answers)
