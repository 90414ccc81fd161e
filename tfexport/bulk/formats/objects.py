"""Files with one JSON object a line, whose bytes are carried along as they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple

from tfexport._io.strict_json import parse_json
from tfexport.bulk.formats.answer import Answer, AnswerColumns
from tfexport.bulk.formats.format import Rows, Scan
from tfexport.bulk.formats.records import DictRows, Record, RecordSource, object_text
from tfexport.errors import InputError, first_line, shortened

# Different keys in one file; bounds what a file with a key of its own in each row takes.
_MAX_COLUMNS = 10_000


class Spelled(NamedTuple):
    """An object, and how it is spelled in its file."""

    text: str
    data: dict[str, Any]


class ObjectSource(RecordSource[Spelled]):
    """Reads one JSON object a line."""

    def _begin(self, lines: Iterator[bytes], columns: dict[str, bool]) -> int:
        return 0

    def _records(self, lines: Iterator[bytes]) -> Iterator[Record[Spelled]]:
        for number, line in enumerate(lines, 1):
            raw = line.strip()
            try:
                data = parse_json(raw)
            except UnicodeDecodeError:
                yield Record(number, len(line), None, "is not UTF-8; convert the file to UTF-8")
            except ValueError as error:
                problem = f"is not JSON ({first_line(error)})" if raw else "is empty"
                yield Record(number, len(line), None, f"{problem}, expected an object; repair it or take it out")
            else:
                if isinstance(data, dict):
                    yield Record(number, len(line), Spelled(raw.decode(), data))
                else:
                    yield Record(number, len(line), None, f"is {shortened(data)}, expected an object; repair it")

    def _columns(self, seen: dict[str, bool], value: Spelled) -> None:
        for name, one in value.data.items():
            seen[name] = seen.get(name, False) or isinstance(one, str)
        if len(seen) > _MAX_COLUMNS:
            raise InputError(f"{self.place.name} has more than {_MAX_COLUMNS} different keys, the limit; check it")

    def _rows(self, values: Sequence[Spelled]) -> Rows:
        return ObjectRows(values)

    def schema(self, scan: Scan) -> Any:
        """Return the schema of its rows, by reading them all.

        Raises:
            InputError: a column holds values that no one type can.
        """
        from tfexport.bulk.formats.columns import common_schema

        return common_schema(self, scan)


class ObjectRows(DictRows):
    """Rows that are spelled in JSON already."""

    def __init__(self, values: Sequence[Spelled]) -> None:
        """Take them."""
        super().__init__([value.data for value in values])
        self._texts = [value.text for value in values]

    def objects(self) -> list[str]:
        """Return each row as its file spells it."""
        return self._texts


class ObjectSink:
    """Writes one JSON object a line: that of the row, with the answer's keys behind its own."""

    def __init__(self, stream: BinaryIO, columns: AnswerColumns) -> None:
        """Begin with an empty file."""
        self._stream, self._columns = stream, columns

    def write(self, rows: Rows, answers: Sequence[Answer]) -> None:
        """Add rows with their answers."""
        lines = []
        for text, answer in zip(rows.objects(), answers, strict=True):
            begun = text.removesuffix("}").rstrip()
            added = object_text(self._columns.values(answer)).removeprefix("{")
            lines.append(f"{begun}{'' if begun == '{' else ', '}{added}\n")
        self._stream.write("".join(lines).encode())

    def close(self) -> None:
        """Do nothing."""

    def abandon(self) -> None:
        """Do nothing."""
