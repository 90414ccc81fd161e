"""Locate, read and write the files of a bulk run with `pyarrow.fs`."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import os
import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast

import pyarrow
import pyarrow.csv
from pyarrow import fs, parquet

from tfexport._io.names import checked_path
from tfexport._io.strict_json import parse_json, plain_problem
from tfexport._io.system import sync
from tfexport.bulk.config import Format, answer_line
from tfexport.errors import MAX_PROBLEMS, InputError, first_line, raise_all, shortened

TEXT_COLUMN = "text"
_BYTES = "bytes"  # field with the content of a file in a column of Hugging Face datasets
_MAX_ROW_BYTES = 64 * 2**20  # of a text format
_MAX_COLUMNS = 10_000  # different keys of a JSON Lines file
_BATCH_ROWS, _BATCH_BYTES = 1024, 8 * 2**20
_GROUP_ROWS, _GROUP_BYTES = 128 * 1024, 64 * 2**20  # of a Parquet output
_MAX_MOVED = 5 * 2**30  # S3 moves an object by copying it; one request copies at most this size
_BUFFER = 1 << 20
_OUT_OF_RANGE = "<value out of range: "  # what Arrow makes of such a time
DRAFT, _BOM = ".tmp-", b"\xef\xbb\xbf"
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_NOT_UTF8 = "is not UTF-8; convert the file, for example with iconv -t utf-8"


class Place:
    """A file or folder of a `pyarrow.fs` file system; messages use its `name`."""

    def __init__(self, system: fs.FileSystem, path: str, name: str = "") -> None:
        self.system, self.path = system, path
        self.is_local = isinstance(system, fs.LocalFileSystem)
        self.name = name or (path if self.is_local else f"{system.type_name}://{path}")

    def __truediv__(self, name: str) -> Place:
        return Place(self.system, f"{self.path}/{name}")

    def is_same(self, other: Place) -> bool:
        paths = Path(self.path), Path(other.path)
        if self.is_local and other.is_local and all(path.exists() for path in paths):
            return paths[0].samefile(paths[1])
        return self.path == other.path and self.system.equals(other.system)

    def open(self) -> pyarrow.NativeFile:
        if self.is_local and (problem := plain_problem(Path(self.path))):
            raise InputError(f"{self.name}: {problem}; check the path")
        return self.system.open_input_file(self.path)

    def stamp(self) -> tuple[int, int]:
        found = self.system.get_file_info(self.path)
        return found.size or 0, found.mtime_ns or 0

    def sha256(self) -> str:
        with self.open() as stream:
            return hashlib.file_digest(io.BufferedReader(cast(Any, stream), _BUFFER), "sha256").hexdigest()

    def names(self) -> frozenset[str]:
        selector = fs.FileSelector(self.path, allow_not_found=True)
        return frozenset(info.base_name for info in self.system.get_file_info(selector))

    @contextmanager
    def writing(self, target: Place) -> Iterator[pyarrow.NativeFile]:
        """Write `target` atomically, through a temporary file in this folder."""
        draft = self / f"{DRAFT}{secrets.token_hex(8)}"
        try:
            # Closing an object of an object store publishes it even after an error, so it needs a temporary name.
            with self.system.open_output_stream(draft.path) as stream:
                yield stream
            if self.is_local:
                sync(Path(draft.path))
            if not self.is_local and draft.stamp()[0] > _MAX_MOVED:
                with draft.open() as source, self.system.open_output_stream(target.path) as stream:
                    shutil.copyfileobj(source, stream, _BUFFER)
            else:
                self.system.move(draft.path, target.path)
            if self.is_local:
                sync(Path(target.path).parent)
        finally:
            with suppress(OSError):
                self.system.delete_file(draft.path)


def find_place(location: str | PathLike[str]) -> Place:
    """Return the place of a path or URI; links in a path are resolved."""
    if isinstance(location, str) and "://" in location:
        try:
            system, path = fs.FileSystem.from_uri(location)
        except (OSError, ValueError) as error:  # the message omits the URI, because it may contain a key
            scheme, _, rest = location.partition("://")
            reason = first_line(error).replace(rest, "…")
            raise InputError(f"{scheme}://…: cannot be reached ({reason}); check the URI") from error
        if not isinstance(system, fs.LocalFileSystem):
            return Place(system, path)
        location = path
    path = checked_path(location, "path")
    return Place(fs.LocalFileSystem(), Path(os.path.realpath(path)).as_posix(), str(path))


@contextmanager
def accessing(name: str, verb: str, remedy: str = "check the place") -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else first_line(error)
        raise InputError(f"{name}: cannot be {verb} ({reason}); {remedy}") from error


@contextmanager
def reading_parquet(name: str, remedy: str) -> Iterator[None]:
    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno:
            raise InputError(f"{name}: cannot be read ({os.strerror(error.errno)}); {remedy}") from error
        raise InputError(f"{name} is not a complete Parquet file ({first_line(error)}); {remedy}") from error


class Row(NamedTuple):
    values: dict[str, Any]
    num_bytes: int
    json: str = ""  # the line of a JSON Lines file


Batch: TypeAlias = "Sequence[Row] | pyarrow.RecordBatch"


@dataclass(frozen=True)
class Source:
    """An input file whose structure was checked; `batches` have a bounded size."""

    columns: Mapping[str, bool]  # whether each column has texts
    batches: Callable[[], Iterator[Batch]]
    schema: Callable[[], pyarrow.Schema]
    files: frozenset[str] = frozenset()  # columns with the content of files


def sources_of(batch: Batch, column: str) -> list[str | bytes | None]:
    if isinstance(batch, pyarrow.RecordBatch):
        values = batch.column(column).to_pylist()
    else:
        values = [row.values.get(column) for row in batch]
    values = [value.get(_BYTES) if isinstance(value, dict) else value for value in values]
    return [value if isinstance(value, str | bytes) else None for value in values]


def without_files(batch: pyarrow.RecordBatch, column: str) -> pyarrow.RecordBatch:
    """Replace a column by nulls."""
    place = batch.schema.get_field_index(column)
    return batch.set_column(place, column, pyarrow.nulls(len(batch), pyarrow.string()))


@contextmanager
def open_source(place: Place, suffix: Format) -> Iterator[Source]:
    with accessing(place.name, "read"), place.open() as stream:
        yield _parquet_source(place.name, stream) if suffix == ".parquet" else _text_source(place.name, suffix, stream)


def _text_source(name: str, suffix: Format, file: pyarrow.NativeFile) -> Source:
    stream = io.BufferedReader(cast(Any, file), _BUFFER)
    columns: dict[str, bool] = {TEXT_COLUMN: True} if suffix == ".txt" else {}

    def rows() -> Iterator[Row | str]:
        stream.seek(0)
        stream.seek(len(_BOM) if stream.read(len(_BOM)) == _BOM else 0)
        lines = iter(lambda: stream.readline(_MAX_ROW_BYTES + 1), b"")
        if suffix in _DELIMITERS:
            return _cell_rows(lines, _DELIMITERS[suffix], columns)
        return _line_rows(lines, _json_row if suffix == ".jsonl" else _text_row)

    def batches() -> Iterator[list[Row]]:
        batch, size = list[Row](), 0
        for row in rows():
            assert isinstance(row, Row)  # otherwise the check has raised
            batch.append(row)
            size += row.num_bytes
            if len(batch) == _BATCH_ROWS or size > _BATCH_BYTES:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    _check(name, suffix, rows(), columns)
    texts = pyarrow.schema([(column, pyarrow.string()) for column in columns])
    return Source(columns, batches, lambda: _common_schema(name, columns, batches()) if suffix == ".jsonl" else texts)


def _check(name: str, suffix: Format, rows: Iterator[Row | str], columns: dict[str, bool]) -> None:
    problems, is_empty = list[str](), suffix not in _DELIMITERS
    for row in rows:
        is_empty = False
        if isinstance(row, str):
            problems.append(row)
        elif suffix == ".jsonl":
            for key, value in row.values.items():
                columns[key] = columns.get(key, False) or isinstance(value, str)
        if len(columns) > _MAX_COLUMNS:
            raise InputError(f"{name} has more than {_MAX_COLUMNS} different columns, the limit; check it")
        if len(problems) > MAX_PROBLEMS:
            problems[MAX_PROBLEMS:] = ["and perhaps more"]
            break
    if is_empty or not (columns or problems):
        problems.append("is empty, expected a row or more; check the file")
    raise_all(InputError, name, problems)


def _line_rows(lines: Iterator[bytes], read: Callable[[bytes], Row]) -> Iterator[Row | str]:
    for number, line in enumerate(lines, 1):
        try:
            yield read(_checked(line))
        except UnicodeDecodeError:
            yield f"line {number} {_NOT_UTF8}"
        except ValueError as error:
            yield f"line {number} {first_line(error)}; repair it or remove it"


def _text_row(line: bytes) -> Row:
    return Row({TEXT_COLUMN: line.removesuffix(b"\n").removesuffix(b"\r").decode()}, len(line))


def _json_row(line: bytes) -> Row:
    if not (raw := line.strip()):
        raise ValueError("is empty, expected an object")
    text = raw.decode()
    try:
        values = parse_json(raw)
    except ValueError as error:
        raise ValueError(f"is not JSON ({first_line(error)}), expected an object") from error
    if not isinstance(values, dict):
        raise ValueError(f"is {shortened(values)}, expected an object")
    return Row(values, len(line), text)


def _cell_rows(lines: Iterator[bytes], delimiter: str, columns: dict[str, bool]) -> Iterator[Row | str]:
    csv.field_size_limit(_MAX_ROW_BYTES)
    reader = csv.reader((_checked(line).decode() for line in lines), delimiter=delimiter, strict=True)
    rows = filter(None, reader)  # without blank lines
    try:
        header = next(rows, [])
        columns |= dict.fromkeys(header, True)
        if repeated := [shortened(cell) for cell, count in Counter(header).items() if count > 1]:
            yield f"line {reader.line_num} names {', '.join(repeated)} twice; rename the columns"
        for cells in rows:
            if len(cells) == len(header):
                yield Row(dict(zip(header, cells, strict=True)), sum(map(len, cells)))
            else:
                problem = f"has {len(cells)} cells, expected {len(header)} as in the first line; repair it"
                yield f"line {reader.line_num} {problem}"
    except UnicodeDecodeError:
        yield f"line {reader.line_num + 1} {_NOT_UTF8}"
    except (csv.Error, ValueError) as error:
        yield f"line {reader.line_num} is not a row of cells ({error}); quote cells with line breaks or quotes"


def _checked(line: bytes) -> bytes:
    if len(line) > _MAX_ROW_BYTES:
        raise ValueError(f"has more than {_MAX_ROW_BYTES} bytes, the limit of a line")
    return line


def _common_schema(name: str, columns: Mapping[str, bool], batches: Iterator[Batch]) -> pyarrow.Schema:
    schema = pyarrow.schema([(column, pyarrow.null()) for column in columns])
    try:
        for batch in batches:
            found = pyarrow.schema(list(pyarrow.array([row.values for row in batch]).type))
            schema = pyarrow.unify_schemas([schema, found], promote_options="permissive")
    except (pyarrow.ArrowException, OverflowError) as error:
        problem = f"a column has values without a common type ({first_line(error)})"
        raise InputError(f"{name} as .parquet: {problem}; write .jsonl") from error
    return schema


def _parquet_source(name: str, stream: pyarrow.NativeFile) -> Source:
    remedy = "copy it again from its source"
    with reading_parquet(name, remedy):
        file = parquet.ParquetFile(stream, pre_buffer=False, buffer_size=_BUFFER, page_checksum_verification=True)
        schema = file.schema_arrow
        groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
    columns = {field.name: _is_text(field.type) for field in schema}
    if len(columns) < len(schema):
        raise InputError(f"{name} has two columns of one name; rename them")
    row_bytes = max((group.total_byte_size // max(group.num_rows, 1) for group in groups), default=0)
    batch_rows = min(max(_BATCH_BYTES // max(row_bytes, 1), 1), _BATCH_ROWS)

    def batches() -> Iterator[pyarrow.RecordBatch]:
        with reading_parquet(name, remedy):
            yield from file.iter_batches(batch_rows, use_threads=False)

    files = frozenset(field.name for field in schema if _is_file(field.type))
    return Source(columns, batches, lambda: schema, files)


def _is_file(kind: pyarrow.DataType) -> bool:
    types = pyarrow.types
    if types.is_struct(kind) and (place := kind.get_field_index(_BYTES)) >= 0:
        kind = kind.field(place).type
    return bool(types.is_binary(kind) or types.is_large_binary(kind))


def _is_text(kind: pyarrow.DataType) -> bool:
    types = pyarrow.types
    kind = kind.value_type if types.is_dictionary(kind) else kind
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def output_schema(source: Source, suffix: Format) -> pyarrow.Schema:
    """Return the schema of staged rows: columns, or texts for CSV, or JSON for .jsonl."""
    if suffix == ".parquet":
        return source.schema()
    names = {".jsonl": ["row"], ".txt": []}.get(suffix, source.columns)
    return pyarrow.schema([(name, pyarrow.string()) for name in names])


def output_rows(batch: Batch, suffix: Format, schema: pyarrow.Schema) -> pyarrow.RecordBatch:
    """Convert a batch to `schema`; raises ValueError, or an error of Arrow."""
    if suffix == ".parquet":
        if isinstance(batch, pyarrow.RecordBatch):
            return batch
        rows = pyarrow.array([row.values for row in batch], pyarrow.struct(list(schema)))
        return pyarrow.RecordBatch.from_struct_array(rows)
    if isinstance(batch, pyarrow.RecordBatch):
        plain = pyarrow.schema([(field.name, _plain(field.type, field.name)) for field in batch.schema])
        table = pyarrow.Table.from_batches([batch]).cast(plain)
        for before, after in zip(batch.schema, plain, strict=True):
            if before.type != after.type and _OUT_OF_RANGE in str(table[after.name].to_pylist()):
                raise ValueError(f"column {after.name} has a time outside of the years 1 to 9999")
        batch = [Row(values, 0) for values in table.to_pylist()]
    if suffix == ".jsonl":
        columns = [[row.json or _object_text(row.values) for row in batch]]
    else:
        columns = [[_cell_text(row.values.get(name)) for row in batch] for name in schema.names]
    return pyarrow.record_batch([pyarrow.array(column, pyarrow.string()) for column in columns], schema=schema)


def _plain(kind: pyarrow.DataType, name: str) -> pyarrow.DataType:
    # The type of a column in JSON and CSV; times and decimals become texts.
    types = pyarrow.types
    if types.is_dictionary(kind):
        return _plain(kind.value_type, name)
    if types.is_struct(kind):
        return pyarrow.struct([(field.name, _plain(field.type, name)) for field in kind])
    if types.is_map(kind):
        return pyarrow.map_(_plain(kind.key_type, name), _plain(kind.item_type, name))
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return pyarrow.list_(_plain(kind.value_type, name))
    if types.is_temporal(kind) or types.is_decimal(kind):
        return pyarrow.string()
    if types.is_primitive(kind) or types.is_null(kind) or _is_text(kind):
        return kind
    raise ValueError(f"column {name} has {kind}")


def _object_text(row: Mapping[str, Any]) -> str:
    try:
        return json.dumps(row, ensure_ascii=False, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(row), ensure_ascii=False)


def _cell_text(value: object) -> str:
    return value or "" if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_output(
    stream: pyarrow.NativeFile, suffix: Format, schema: pyarrow.Schema, parts: Iterator[tuple[pyarrow.Table, ...]]
) -> None:
    """Write staged rows and their outputs: text, score, finish reason and error."""
    tables = (pyarrow.table([*rows.columns, *answers.columns], schema=schema) for rows, answers in parts)
    if suffix == ".parquet":
        with parquet.ParquetWriter(stream, schema, compression="zstd") as writer:
            for table in regrouped(tables, _GROUP_ROWS, _GROUP_BYTES):
                writer.write_table(table)
    elif suffix in _DELIMITERS:
        options = pyarrow.csv.WriteOptions(delimiter=_DELIMITERS[suffix])
        with pyarrow.csv.CSVWriter(stream, schema, write_options=options) as writer:
            for table in tables:
                writer.write_table(table)
    elif suffix == ".jsonl":
        for rows, answers in parts:
            objects = map(_extended, rows["row"].to_pylist(), answers.to_pylist())
            stream.write("".join(f"{text}\n" for text in objects).encode())
    else:
        are_lists = pyarrow.types.is_list(schema.types[0])
        for number, row in enumerate((row for _, answers in parts for row in answers.to_pylist()), 1):
            text, score, *_ = row.values()
            # Without numbers, a row with an error becomes an empty line, so that line n is row n.
            pairs = zip(text or (), score or (), strict=True) if are_lists else [(text or "", 0.0)]
            lines = [answer_line(one, number if are_lists else None, two) for one, two in pairs]
            stream.write("".join(f"{line}\n" for line in lines).encode())


def regrouped(tables: Iterable[pyarrow.Table], max_rows: int, max_bytes: int) -> Iterator[pyarrow.Table]:
    """Yield the same rows in tables of at most `max_rows` and about `max_bytes`."""
    pieces, num_rows, num_bytes = list[pyarrow.Table](), 0, 0
    for table in tables:
        start = 0
        while start < table.num_rows:
            piece = table.slice(start, max_rows - num_rows)
            start, num_rows, num_bytes = start + piece.num_rows, num_rows + piece.num_rows, num_bytes + piece.nbytes
            pieces.append(piece)
            if num_rows == max_rows or num_bytes >= max_bytes:
                yield pyarrow.concat_tables(pieces)
                pieces, num_rows, num_bytes = [], 0, 0
    if pieces:
        yield pyarrow.concat_tables(pieces)


def _extended(row: str, answer: dict[str, Any]) -> str:
    start = row.removesuffix("}").rstrip()
    return f"{start}{'' if start == '{' else ', '}{_object_text(answer).removeprefix('{')}"
