"""Files with cells between commas (RFC 4180), the first row of which names the columns."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import BinaryIO

from tfexport.bulk.formats.answer import Answer, AnswerColumns
from tfexport.bulk.formats.format import Rows
from tfexport.bulk.formats.records import MAX_LINE, DictRows, Record, RecordSource, cell_text
from tfexport.errors import InputError, shortened


class CellSource(RecordSource[list[str]]):
    """Reads rows of cells; a cell in quotes may have commas, quotes, which are doubled, and line breaks."""

    _header: tuple[str, ...] = ()
    _header_lines = 1

    def _begin(self, lines: Iterator[bytes], columns: dict[str, bool]) -> int:
        for record in self._rows_of(lines):
            if record.problem or record.value is None:
                raise InputError(f"{self.place.name}: line 1 {record.problem}")
            names = record.value
            twice = [name for name, count in Counter(names).items() if count > 1]
            if twice:
                raise InputError(
                    f"{self.place.name}: the first line names {', '.join(map(shortened, twice))} twice, expected the "
                    "name of each column once; rename them"
                )
            self._header, self._header_lines = tuple(names), record.line
            columns.update(dict.fromkeys(names, True))
            return record.size
        return 0

    def _records(self, lines: Iterator[bytes]) -> Iterator[Record[list[str]]]:
        width = len(self._header)
        for record in self._rows_of(lines):
            found = record._replace(line=record.line + self._header_lines)
            if record.value is None or len(record.value) == width:
                yield found
            else:
                problem = f"has {len(record.value)} cells, expected {width} as in the first line; repair it"
                yield found._replace(value=None, problem=problem)

    def _rows_of(self, lines: Iterator[bytes]) -> Iterator[Record[list[str]]]:
        taken, broken = 0, False

        def texts() -> Iterator[str]:
            nonlocal taken, broken
            for line in lines:
                taken += len(line)
                text = line.decode(errors="replace")
                broken = broken or ("\ufffd" in text and not _is_utf8(line))
                yield text

        csv.field_size_limit(MAX_LINE)
        reader = csv.reader(texts(), strict=True)
        while True:
            taken, broken = 0, False
            try:
                value = next(reader, None)
            except csv.Error as error:
                problem = f"is no row of cells ({error}); quote cells with line breaks, and double quotes in them"
                yield Record(reader.line_num, taken, None, problem)
                continue
            if value is None:
                return
            problem = "is not UTF-8; convert the file, for example with iconv -t utf-8"
            yield Record(reader.line_num, taken, None if broken else value, problem if broken else None)

    def _columns(self, seen: dict[str, bool], value: list[str]) -> None:
        pass

    def _rows(self, values: Sequence[list[str]]) -> Rows:
        return DictRows([dict(zip(self._header, value, strict=True)) for value in values])


class CellSink:
    """Writes rows of cells, the names of the columns first; a cell is quoted where it has to be."""

    def __init__(self, stream: BinaryIO, carried: Sequence[str], columns: AnswerColumns) -> None:
        """Begin with the names."""
        self._stream, self._carried, self._columns = stream, carried, columns
        self._write([[*carried, *columns.names]])

    def write(self, rows: Rows, answers: Sequence[Answer]) -> None:
        """Add rows with their answers."""
        added = ([cell_text(value) for value in self._columns.values(answer).values()] for answer in answers)
        self._write([[*row, *more] for row, more in zip(rows.cells(self._carried), added, strict=True)])

    def close(self) -> None:
        """Do nothing."""

    def abandon(self) -> None:
        """Do nothing."""

    def _write(self, rows: Sequence[Sequence[str]]) -> None:
        text = io.StringIO(newline="")
        csv.writer(text, lineterminator="\n").writerows(rows)
        self._stream.write(text.getvalue().encode())


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True
