"""Parquet, whose columns and types are carried along as they are.

Reading and writing take the memory of a few parts, whatever the sizes of file and row groups:
https://arrow.apache.org/docs/python/parquet.html
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO

import pyarrow
from pyarrow import compute, parquet

from tfexport.bulk.formats.answer import Answer, AnswerColumns
from tfexport.bulk.formats.format import PIECE_BYTES, Part, Rows, Scan, Source, cut
from tfexport.bulk.formats.records import DictRows
from tfexport.bulk.places.place import Place, reading
from tfexport.errors import InputError, first_line, raise_all

# Of a row group that is written: whichever is reached first.
_GROUP_ROWS, _GROUP_BYTES = 128 * 1024, 64 * 2**20
# Bytes of a column that are read at once.
_BUFFER = 1 << 20


class ColumnSource:
    """Reads Parquet; see `Source`."""

    row_name = "row {}"

    def __init__(self, place: Place) -> None:
        """Name it; nothing is read."""
        self.place = place
        self._stream: BinaryIO | None = None
        self._file: parquet.ParquetFile | None = None
        self._reader: _Reader | None = None

    def scan(self, rows_per_part: int) -> Scan:
        """Read all of it once, and check its structure.

        Raises:
            InputError: it is no Parquet file, or not all of one.
        """
        with reading(self.place.name), self.place.open() as stream:
            sha = hashlib.sha256()
            while read := stream.read(_BUFFER):
                sha.update(read)
        metadata = self._opened().metadata
        columns = {field.name: _is_text(field.type) for field in self._opened().schema_arrow}
        if len(columns) < len(self._opened().schema_arrow):
            raise InputError(f"{self.place.name} has two columns of one name; rename them")
        return Scan(sha.hexdigest(), metadata.num_rows, columns, cut(metadata.num_rows, rows_per_part))

    def read(self, part: Part, columns: Sequence[str] | None = None) -> Iterator[Rows]:
        """Yield the rows of a part in pieces, all of their columns or some; cheapest in the order of the parts."""
        chosen, row, end = None if columns is None else tuple(columns), part.first, part.first + part.count
        while row < end:
            with self._damage():
                if self._reader is None or not self._reader.reaches(row, chosen):
                    self._reader = _Reader(self._opened(), row, chosen)
                table = self._reader.take(row, end - row)
            row += table.num_rows
            yield ColumnRows(table)

    def check_spelled(self, form: str) -> None:
        """Refuse columns that have bytes, which a text format cannot hold.

        Raises:
            InputError: lists them.
        """
        raw = [field.name for field in self._opened().schema_arrow if _has_bytes(field.type)]
        if raw:
            raise InputError(
                f"{self.place.name}: column {', '.join(raw)} has bytes, which {form} cannot hold; write .parquet"
            )

    def schema(self, scan: Scan) -> pyarrow.Schema:
        """Return the schema of its rows, as the file has it."""
        return self._opened().schema_arrow

    def close(self) -> None:
        """Close the file."""
        self._reader = self._file = None
        if self._stream is not None:
            with suppress(OSError):  # all that was wanted is read
                self._stream.close()

    def _opened(self) -> parquet.ParquetFile:
        if self._file is None:
            with self._damage():
                self._stream = self.place.open()
                self._file = parquet.ParquetFile(
                    self._stream, pre_buffer=False, buffer_size=_BUFFER, page_checksum_verification=True
                )
        return self._file

    @contextmanager
    def _damage(self) -> Iterator[None]:
        with reading(self.place.name):
            try:
                yield
            except (pyarrow.ArrowException, OSError) as error:
                if isinstance(error, OSError) and error.errno:
                    raise
                raise InputError(
                    f"{self.place.name} is no whole Parquet file ({first_line(error)}); copy it again from its source"
                ) from error


class _Reader:
    """Goes through a file from one of its rows, forwards."""

    def __init__(self, file: parquet.ParquetFile, first: int, columns: tuple[str, ...] | None) -> None:
        self._columns, self._place = columns, 0
        sizes = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
        groups = list(range(len(sizes)))
        # What lies before the row is not read, as far as whole row groups go.
        while groups and self._place + sizes[groups[0]].num_rows <= first:
            self._place += sizes[groups.pop(0)].num_rows
        row_bytes = max(
            (sizes[number].total_byte_size // max(sizes[number].num_rows, 1) for number in groups), default=0
        )
        at_once = 1024 if columns is not None else min(max(PIECE_BYTES // max(row_bytes, 1), 1), 1024)
        self._batches = file.iter_batches(at_once, row_groups=groups, columns=columns, use_threads=False)
        self._left: pyarrow.Table | None = None

    def reaches(self, row: int, columns: tuple[str, ...] | None) -> bool:
        return self._place <= row and self._columns == columns

    def take(self, first: int, most: int) -> pyarrow.Table:
        """Return one row or more, and leave what is before them out."""
        while self._left is None or self._place + self._left.num_rows <= first:
            self._place += self._left.num_rows if self._left is not None else 0
            self._left = pyarrow.Table.from_batches([next(self._batches)])
        found = self._left.slice(first - self._place, most)
        self._left = self._left.slice(first - self._place + found.num_rows)
        self._place = first + found.num_rows
        return found


class ColumnRows:
    """Rows of a table; see `Rows`."""

    def __init__(self, table: pyarrow.Table) -> None:
        """Take them."""
        self._table = table

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def column(self, name: str) -> list[Any]:
        """Return what each row has in a column, None for nothing."""
        values: list[Any] = self._table.column(name).to_pylist()
        return values

    def objects(self) -> list[str]:
        """Spell each row as a JSON object, in one line."""
        return self._dicts().objects()

    def cells(self, columns: Sequence[str]) -> list[list[str]]:
        """Spell each row as texts, "" for nothing."""
        return self._dicts().cells(columns)

    def table(self, schema: pyarrow.Schema) -> pyarrow.Table:
        """Return them as they are."""
        return self._table

    def _dicts(self) -> DictRows:
        columns = [
            compute.cast(column, pyarrow.string()) if _is_spelled(column.type) else column
            for column in self._table.columns
        ]
        return DictRows(pyarrow.table(columns, names=self._table.column_names).to_pylist())


class ColumnSink:
    """Writes Parquet: the columns of the rows, and behind them those of the answers."""

    def __init__(self, stream: BinaryIO, schema: pyarrow.Schema, columns: AnswerColumns) -> None:
        """Begin with an empty file."""
        self._columns, self._carried = columns, schema
        self._schema = _with_answers(schema, columns)
        self._writer = parquet.ParquetWriter(stream, self._schema, compression="zstd")
        self._waiting: list[pyarrow.Table] = []

    def write(self, rows: Rows, answers: Sequence[Answer]) -> None:
        """Add rows with their answers."""
        table, added = rows.table(self._carried), [self._columns.values(answer) for answer in answers]
        for name in self._columns.names:
            field = self._schema.field(name)
            table = table.append_column(field, pyarrow.array([values[name] for values in added], field.type))
        self._waiting.append(table.replace_schema_metadata(self._schema.metadata))
        num_rows = sum(table.num_rows for table in self._waiting)
        if num_rows >= _GROUP_ROWS or sum(table.nbytes for table in self._waiting) >= _GROUP_BYTES:
            self._flush()

    def close(self) -> None:
        """Write what is left; the stream stays open."""
        self._flush()
        self._writer.close()

    def abandon(self) -> None:
        """Write nothing more, for what is there is thrown away."""
        self._writer.is_open = False  # or it would write its footer when it is freed

    def _flush(self) -> None:
        if self._waiting:
            self._writer.write_table(pyarrow.concat_tables(self._waiting))
            self._waiting = []


def column_sink(source: Source, scan: Scan, columns: AnswerColumns) -> Callable[[BinaryIO], ColumnSink]:
    """Return what opens a writer of Parquet for the rows of a source.

    Raises:
        InputError: a column holds what no one type can.
    """
    schema = source.schema(scan)
    return lambda stream: ColumnSink(stream, schema, columns)


def common_schema(source: Source, scan: Scan) -> pyarrow.Schema:
    """Find the types that hold what is in each column, part by part.

    Raises:
        InputError: lists the columns that hold what no one type can.
    """
    types: dict[str, pyarrow.DataType] = dict.fromkeys(scan.columns, pyarrow.null())
    problems: dict[str, str] = {}
    for rows in (rows for part in scan.parts for rows in source.read(part)):
        for name in types.keys() - problems.keys():
            try:
                found = pyarrow.array(rows.column(name)).type
                both = [pyarrow.schema([(name, kind)]) for kind in (types[name], found)]
                types[name] = pyarrow.unify_schemas(both, promote_options="permissive").field(name).type
            except (pyarrow.ArrowException, OverflowError) as error:
                problems[name] = f"column {json.dumps(name)} has values of no one type ({first_line(error)})"
    listed = [f"{problem}; write .jsonl" for problem in problems.values()]
    raise_all(InputError, f"{source.place.name} as Parquet", listed)
    return pyarrow.schema(types.items())


def _with_answers(schema: pyarrow.Schema, columns: AnswerColumns) -> pyarrow.Schema:
    kinds = [pyarrow.string(), pyarrow.float64(), pyarrow.string()]
    if columns.are_lists:
        kinds = [pyarrow.list_(kind) for kind in kinds]
    for name, kind in zip(columns.names, [*kinds, pyarrow.string()], strict=True):
        schema = schema.append(pyarrow.field(name, kind))
    return schema


def _is_text(kind: pyarrow.DataType) -> bool:
    types = pyarrow.types
    if types.is_dictionary(kind):
        kind = kind.value_type
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _is_spelled(kind: pyarrow.DataType) -> bool:
    """Say whether a text says a value better than Python does, such as nanoseconds."""
    return bool(pyarrow.types.is_temporal(kind) and not pyarrow.types.is_interval(kind))


def _has_bytes(kind: pyarrow.DataType) -> bool:
    types = pyarrow.types
    inner = [kind.field(index).type for index in range(kind.num_fields)]
    is_bytes = types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind)
    return bool(is_bytes or types.is_binary_view(kind) or any(map(_has_bytes, inner)))
