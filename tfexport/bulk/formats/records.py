"""What text formats share: rows that lie one behind the other, found by the byte where each begins."""

from __future__ import annotations

import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, BinaryIO, Generic, NamedTuple, TypeVar

from tfexport.bulk.formats.format import PIECE_BYTES, Part, Rows, Scan, cut
from tfexport.bulk.places.place import Place, reading
from tfexport.errors import MAX_PROBLEMS, InputError, raise_all

# Bytes of a line; bounds what a file without line breaks takes.
MAX_LINE = 64 * 2**20
_BOM = b"\xef\xbb\xbf"
T = TypeVar("T")


class Record(NamedTuple, Generic[T]):
    """A row as it lies in a file.

    Attributes:
        line: of the file in which it ends, from 1.
        size: in bytes, with its end.
        value: that was read; None where it is broken.
        problem: with it; None for none.
    """

    line: int
    size: int
    value: T | None
    problem: str | None = None


class RecordSource(ABC, Generic[T]):
    """A text file that is read; see `Source`. A subclass knows its rows."""

    row_name = "line {}"

    def __init__(self, place: Place) -> None:
        """Name it; nothing is read."""
        self.place = place
        self._stream: BinaryIO | None = None

    @abstractmethod
    def _begin(self, lines: Iterator[bytes], columns: dict[str, bool]) -> int:
        """Read what stands before the rows, note the columns that it names, and return its bytes."""

    @abstractmethod
    def _records(self, lines: Iterator[bytes]) -> Iterator[Record[T]]:
        """Read rows to the end of the lines."""

    @abstractmethod
    def _columns(self, seen: dict[str, bool], value: T) -> None:
        """Note the columns of a row, and whether each has a text there."""

    @abstractmethod
    def _rows(self, values: Sequence[T]) -> Rows:
        """Return rows that were read."""

    def scan(self, rows_per_part: int) -> Scan:
        """Read all of it once, and check its structure.

        Raises:
            InputError: lists what is broken.
        """
        sha, columns, problems = hashlib.sha256(), dict[str, bool](), list[str]()
        starts, count = [], 0
        with reading(self.place.name), self.place.open() as stream:
            lines = _lines(stream, self.place.name, sha.update)
            end = len(_BOM) if _skip_bom(stream) else 0
            sha.update(_BOM[:end])
            end += self._begin(lines, columns)
            for record in self._records(lines):
                if count % rows_per_part == 0:
                    starts.append(end)
                count, end = count + 1, end + record.size
                if record.value is not None:
                    self._columns(columns, record.value)
                if record.problem is not None:
                    problems.append(f"line {record.line} {record.problem}")
                    if len(problems) > MAX_PROBLEMS:
                        raise_all(InputError, self.place.name, [*problems[:MAX_PROBLEMS], "and perhaps more"])
        raise_all(InputError, self.place.name, problems)
        if not end:
            raise InputError(f"{self.place.name} is empty, expected a row or more; check the file")
        return Scan(sha.hexdigest(), count, columns, cut(count, rows_per_part, starts))

    def read(self, part: Part, columns: Sequence[str] | None = None) -> Iterator[Rows]:
        """Yield the rows of a part in pieces, all of their columns whatever is asked for."""
        with reading(self.place.name):
            if self._stream is None:
                self._stream = self.place.open()
                _skip_bom(self._stream)
                self._begin(_lines(self._stream, self.place.name), {})
            self._stream.seek(part.start)
        num_rows, values, size = 0, list[T](), 0
        records = islice(self._records(_lines(self._stream, self.place.name)), part.count)
        while True:
            with reading(self.place.name):
                record = next(records, None)
            if values and (record is None or size + record.size > PIECE_BYTES):
                yield self._rows(values)
                values, size = [], 0
            if record is None:
                break
            if record.value is not None:
                values.append(record.value)
                num_rows, size = num_rows + 1, size + record.size
        if num_rows != part.count:
            raise InputError(f"{self.place.name} was changed while it was read; leave it alone, and run again")

    def check_spelled(self, form: str) -> None:
        """Do nothing: a text holds what a text says."""

    def schema(self, scan: Scan) -> Any:
        """Return the schema of its rows: texts alone."""
        import pyarrow

        return pyarrow.schema([(name, pyarrow.string()) for name in scan.columns])

    def close(self) -> None:
        """Close the file."""
        if self._stream is not None:
            with suppress(OSError):  # all that was wanted is read
                self._stream.close()


class DictRows:
    """Rows of which each is a mapping from columns to values of JSON; see `Rows`."""

    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        """Take them."""
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def column(self, name: str) -> list[Any]:
        """Return what each row has in a column, None for nothing."""
        return [row.get(name) for row in self._rows]

    def objects(self) -> list[str]:
        """Spell each row as a JSON object, in one line."""
        return [object_text(row) for row in self._rows]

    def cells(self, columns: Sequence[str]) -> list[list[str]]:
        """Spell each row as texts, "" for nothing."""
        return [[cell_text(row.get(name)) for name in columns] for row in self._rows]

    def table(self, schema: Any) -> Any:
        """Return them as a pyarrow.Table with a schema."""
        import pyarrow

        return pyarrow.table([pyarrow.array(self.column(field.name), field.type) for field in schema], schema=schema)


def object_text(row: dict[str, Any]) -> str:
    """Spell a row as JSON in one line; what JSON has no numbers for is null, and what it has no values for a text."""
    try:
        return json.dumps(row, ensure_ascii=False, allow_nan=False, default=str)
    except ValueError:
        return json.dumps(_finite(row), ensure_ascii=False, default=str)


def cell_text(value: object) -> str:
    """Spell a value as the text of a cell: a text as it is, "" for nothing, anything else as JSON."""
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value, ensure_ascii=False, default=str).removeprefix('"').removesuffix('"')


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _skip_bom(stream: BinaryIO) -> bool:
    if stream.read(len(_BOM)) == _BOM:
        return True
    stream.seek(0)
    return False


def _lines(stream: BinaryIO, name: str, on_line: Callable[[bytes], object] | None = None) -> Iterator[bytes]:
    """Yield lines with their ends, and show each to `on_line`."""
    while line := stream.readline(MAX_LINE + 1):
        if len(line) > MAX_LINE:
            raise InputError(f"{name} has a line of more than {MAX_LINE} bytes, the limit; break it into lines")
        if on_line:
            on_line(line)
        yield line
