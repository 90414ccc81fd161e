"""Stage an input next to its output, decode the missing parts, and join them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from itertools import accumulate
from os import PathLike
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

from tfexport._io.atomic import locked
from tfexport._io.strict_json import seal, unseal
from tfexport.bulk import _files
from tfexport.bulk._files import Place, Source, accessing, find_place, open_source
from tfexport.bulk.config import BulkConfig, Format, Progress, Summary, need_format
from tfexport.config import Config
from tfexport.errors import InputError, first_line, raise_all
from tfexport.generation import DecodeConfig

FORMAT_VERSION = 3
SUFFIXES = ("", "_score", "_finish_reason", "_error")
NO_TEXT = "the row has no text"
_JOB, _TEXTS, _ROWS, _PART = "job.json", "texts.parquet", "rows.parquet", re.compile(r"part-(\d{8})\.parquet")
_PART_BYTES = 32 * 2**20


class Job(Config, subject=_JOB):
    """All settings that the output depends on; a changed job cannot be resumed."""

    format_version: int = FORMAT_VERSION
    bundle_sha256: str
    backend: str
    input_sha256: str
    input_format: Format
    input_column: str | None
    output_format: Format
    output_column: str
    prefix: str | None
    rows_per_part: int
    decoding: DecodeConfig


@dataclass(frozen=True)
class Reader:
    """How a model reads the column of the sources."""

    check: Callable[[list[Any]], object]  # raises `InputError` if the model cannot read the sources
    takes_files: bool  # the column has paths of files, or their content


@dataclass(frozen=True)
class Part:
    """Rows that are decoded and saved together; `number` and `first` count from 0."""

    number: int
    first: int
    count: int

    @property
    def name(self) -> str:
        return f"part-{self.number:08d}.parquet"


class Meter:
    """Count the rows that a run has decoded, and report progress."""

    def __init__(self, num_rows: int, done: int, on_progress: Callable[[Progress], None] | None) -> None:
        self._num_rows, self._former, self._on_progress = num_rows, done, on_progress
        self._start, self._decoded = time.perf_counter(), 0

    def add(self, rows: int) -> None:
        self.set(self._decoded + rows)

    def set(self, decoded: int) -> None:
        self._decoded = decoded
        if self._on_progress:
            done, rate = self._former + decoded, self.rate()
            self._on_progress(Progress(self._num_rows, done, rate, (self._num_rows - done) / rate if rate else None))

    def rate(self) -> float:
        return self._decoded / max(time.perf_counter() - self._start, 1e-9)


class Store:
    """The folder of a run; each part is a Parquet file with the columns of `schema`."""

    def __init__(self, target: str | PathLike[str], config: BulkConfig, decoding: DecodeConfig) -> None:
        self.suffix, self.target = need_format(target, "output"), find_place(target)
        self.folder = Place(self.target.system, f"{self.target.path}.parts", f"{self.target.name}.parts")
        are_lists = decoding.num_return_sequences > 1
        if are_lists and self.suffix in (".csv", ".tsv"):
            problem = f"num_return_sequences is above 1, and a cell of {self.suffix} holds one text"
            raise InputError(f"{problem}; write .jsonl")
        types = [pyarrow.string(), pyarrow.float64(), pyarrow.string()]
        types = [*(map(pyarrow.list_, types) if are_lists else types), pyarrow.string()]
        self._files = ExitStack()  # closed before the folder is deleted, as Windows requires
        names = [config.output_column + suffix for suffix in SUFFIXES]
        self.schema = pyarrow.schema(list(zip(names, types, strict=True)))

    @cached_property
    def _texts(self) -> parquet.ParquetFile:
        return self._open(_TEXTS, self._files)

    @cached_property
    def parts(self) -> list[Part]:
        counts = [self._texts.metadata.row_group(number).num_rows for number in range(self._texts.num_row_groups)]
        return [Part(*row) for row in zip(range(len(counts)), accumulate(counts, initial=0), counts, strict=False)]

    @cached_property
    def _job_sha256(self) -> str:
        with (self.folder / _JOB).open() as stream:
            return sha256(stream.read()).hexdigest()

    def _metadata(self, part: Part) -> dict[bytes, bytes]:
        return {b"part": f"{part.number} of job {self._job_sha256}".encode()}

    def missing(self) -> list[Part]:
        with accessing(self.folder.name, "read"):
            names = self.folder.names()
        return [part for part in self.parts if part.name not in names]

    def sources(self, part: Part) -> list[str | bytes | None]:
        return self._read(_TEXTS, self._texts, part, part.number).column(0).to_pylist()  # type: ignore[no-any-return]

    def save(self, part: Part, rows: Sequence[tuple[Any, ...]]) -> None:
        """Write a finished part; each row is a tuple of the values of `schema`."""
        table = pyarrow.table(list(zip(*rows, strict=True)), schema=self.schema)
        with self._writing(part.name) as stream:
            table = table.replace_schema_metadata(self._metadata(part))
            parquet.write_table(table, stream, compression="zstd", write_page_checksum=True)

    def finish(self) -> int:
        """Join the parts into the output, delete the folder, and count rows with errors."""
        num_errors = 0
        rows = None if self.suffix == ".txt" else self._open(_ROWS, self._files)
        schema = rows.schema_arrow if rows else pyarrow.schema([])
        for field in self.schema:
            schema = schema.append(field)

        def parts() -> Iterator[tuple[pyarrow.Table, pyarrow.Table]]:
            nonlocal num_errors
            for part in self.parts:
                with ExitStack() as opened:
                    answers = self._read(part.name, self._open(part.name, opened), part, 0)
                num_errors += part.count - answers.column(3).null_count
                yield self._read(_ROWS, rows, part, part.number) if rows else answers, answers

        with self._writing() as stream:
            _files.write_output(stream, self.suffix, schema, parts())
        self.remove()
        return num_errors

    def remove(self) -> None:
        self._files.close()
        with accessing(self.folder.name, "written"):
            # The job first: if this is interrupted, the next run must not resume an incomplete folder.
            if _JOB in self.folder.names():
                self.folder.system.delete_file((self.folder / _JOB).path)
            self.folder.system.delete_dir(self.folder.path)

    @contextmanager
    def _writing(self, name: str = "") -> Iterator[pyarrow.NativeFile]:
        target = self.folder / name if name else self.target
        remedy = f"fix this and run the same command again; finished parts are kept in {self.folder.name}"
        subject = self.folder.name if name else target.name
        with accessing(subject, "written", remedy), self.folder.writing(target) as stream:
            yield stream

    def _open(self, name: str, opened: ExitStack) -> parquet.ParquetFile:
        with self._reading(name):
            file = opened.enter_context((self.folder / name).open())
            return parquet.ParquetFile(file, page_checksum_verification=True)

    def _read(self, name: str, file: parquet.ParquetFile, part: Part, group: int) -> pyarrow.Table:
        with self._reading(name):
            table = file.read_row_group(group)
            is_whole = name != part.name or (
                table.schema.equals(self.schema) and table.schema.metadata == self._metadata(part)
            )
            if table.num_rows != part.count or not is_whole:
                raise pyarrow.ArrowInvalid("it has other rows")
            return table

    def _reading(self, name: str) -> AbstractContextManager[None]:
        file = "the folder" if name in (_TEXTS, _ROWS) else "it"
        return _files.reading_parquet(f"{self.folder.name}/{name}", f"remove {file} and run the same command again")

    def resumes(self, job: Job) -> bool:
        """Return whether the folder belongs to this job; empty it if it has none."""
        with accessing(self.folder.name, "written"):
            names = self.folder.names()
            drafts = {name for name in names if name.startswith(_files.DRAFT)}
            if foreign := [name for name in names - drafts - {_JOB, _TEXTS, _ROWS} if not _PART.fullmatch(name)]:
                problem = f"has {min(foreign)}, which is not part of a run"
                raise InputError(f"{self.folder.name} {problem}; move it away, or choose another --output")
            if _JOB not in names:
                if names:
                    self.remove()
                self.folder.system.create_dir(self.folder.path)
                return False
            for draft in drafts:
                self.folder.system.delete_file((self.folder / draft).path)
            with (self.folder / _JOB).open() as stream:
                raw = stream.read()
        remedy, name = f"remove {self.folder.name} to start anew", f"{self.folder.name}/{_JOB}"
        former = unseal(raw, Job.from_dict, name=name, format_version=FORMAT_VERSION, remedy=remedy)
        now, before = ({**data.pop("decoding"), **data} for data in (job.to_dict(), former.to_dict()))
        changed = [
            f"{name} is {value!r} and was {before[name]!r}" for name, value in now.items() if value != before[name]
        ]
        if changed:
            problem = f"has the parts of another run ({'; '.join(changed)})"
            raise InputError(f"{self.folder.name} {problem}; pass the former options to resume it, or {remedy}")
        return True

    def stage(self, source: Source, name: str, reader: Reader, job: Job) -> None:
        """Write the sources and the staged rows in parts, and then the job."""
        files = source.files if reader.takes_files else frozenset[str]()
        column = _choose_column({**source.columns, **dict.fromkeys(files, True)}, job.input_column, name)
        if self.suffix != ".txt" and (taken := [one for one in self.schema.names if one in source.columns]):
            problem = f"{name} already has the column {', '.join(taken)}"
            raise InputError(f"{problem}; choose another name for the outputs with --output-column")
        schema = _files.output_schema(source, self.suffix)
        kind = pyarrow.binary() if column in files else pyarrow.string()
        problems, num_rows = list[str](), 0

        def tables() -> Iterator[pyarrow.Table]:
            nonlocal num_rows
            for batch in source.batches():
                texts = _files.sources_of(batch, column)
                for row, text in enumerate(texts if self.suffix == ".txt" else (), num_rows + 1):
                    try:
                        if text is None:
                            raise InputError(NO_TEXT)
                        reader.check([text])
                    except InputError as error:
                        problems.append(f"row {row}: {error.reason}")
                num_rows += len(texts)
                # Texts and staged rows are one table here, so that both files are divided into the same parts.
                is_kept = column not in files or self.suffix == ".parquet"
                kept = batch if is_kept else _files.without_files(batch, column)
                rows = _files.output_rows(kept, self.suffix, schema)
                columns = [pyarrow.array(texts, kind), *rows.columns]
                yield pyarrow.table(columns, list(map(str, range(len(columns)))))

        with ExitStack() as stack:
            try:
                writers, texts_schema = [], pyarrow.schema([("text", kind)])
                for file, staged in {_TEXTS: texts_schema, **({_ROWS: schema} if schema else {})}.items():
                    stream = stack.enter_context(self._writing(file))
                    writer = parquet.ParquetWriter(stream, staged, compression="zstd", write_page_checksum=True)
                    writers.append(stack.enter_context(writer))
                for table in _files.regrouped(tables(), job.rows_per_part, _PART_BYTES):
                    for writer, columns in zip(writers, (table.columns[:1], table.columns[1:]), strict=False):
                        writer.write_table(pyarrow.table(columns, schema=writer.schema), len(table))
            except (pyarrow.ArrowException, OverflowError, ValueError) as error:
                problem = f"{self.suffix} cannot hold this ({first_line(error)})"
                raise InputError(f"{name}: {problem}; choose another format for --output") from error
            raise_all(InputError, name, problems, remedy="fix these rows, or write .jsonl: a .txt cannot hold errors")
        with self._writing(_JOB) as stream:
            stream.write(seal(job.to_dict()))


def _choose_column(columns: Mapping[str, bool], wanted: str | None, name: str) -> str:
    texts = [column for column, has_texts in columns.items() if has_texts]
    listed = f"its columns with texts are {', '.join(texts)}" if texts else "it has no column with texts"
    if wanted is None:
        wanted = texts[0] if len(texts) == 1 else _files.TEXT_COLUMN
    elif wanted not in texts:
        missing = f"column {wanted} has no texts" if wanted in columns else f"there is no column {wanted}"
        listed = f"{missing}, {listed}"
    if wanted in texts:
        return wanted
    remedy = "choose one with --input-column" if texts else "convert one to texts"
    raise InputError(f"{name}: {listed}; {remedy}")


def run_job(
    source: str | PathLike[str],
    target: str | PathLike[str],
    config: BulkConfig,
    decoding: DecodeConfig,
    reader: Reader,
    bundle_sha256: str,
    backend: str,
    decode: Callable[[Store, Sequence[Part], Meter], None],
    report: Callable[[str], None],
    on_progress: Callable[[Progress], None] | None,
) -> Summary:
    """Check everything, stage the input or resume a run, decode, and join."""
    suffix, place, store = need_format(source, "input"), find_place(source), Store(target, config, decoding)
    with ExitStack() as stack:
        output = store.target
        with accessing(output.name, "written", "choose another place"):
            if place.is_same(output):
                raise InputError(f"{output.name} is also the input; choose another --output")
            if output.is_local and Path(output.path).is_dir():
                raise InputError(f"{output.name}: is a directory, expected the name of a file; choose another place")
            if output.is_local:  # object stores have no locks; two runs there only duplicate the work
                stack.enter_context(locked(Path(output.path)))
        report(f"reading {place.name}")
        with accessing(place.name, "read"):
            stamp, input_sha256 = place.stamp(), place.sha256()
        job = Job(
            bundle_sha256=bundle_sha256,
            backend=backend,
            input_sha256=input_sha256,
            input_format=suffix,
            output_format=store.suffix,
            decoding=decoding,
            **{name: getattr(config, name) for name in ("input_column", "output_column", "prefix", "rows_per_part")},
        )
        if not store.resumes(job):
            try:
                with open_source(place, suffix) as opened:
                    store.stage(opened, place.name, reader, job)
                if place.stamp() != stamp:
                    raise InputError(f"{place.name} was changed while it was read; run again")
            except BaseException:
                store.remove()
                raise
        missing = store.missing()
        num_rows, num_left = (sum(part.count for part in parts) for parts in (store.parts, missing))
        if num_rows > num_left:
            report(f"resuming a former run: {num_rows - num_left:,} of {num_rows:,} rows are done")
        meter = Meter(num_rows, num_rows - num_left, on_progress)
        decode(store, missing, meter)
        rate = meter.rate()
        report(f"joining {num_rows:,} rows into {output.name}")
        return Summary(num_rows, num_left, store.finish(), rate)
