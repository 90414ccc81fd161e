"""Store a run next to its output: its settings, staged input and finished parts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from os import PathLike
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

from tfexport._io.atomic import locked
from tfexport._io.strict_json import seal, unseal
from tfexport.bulk._files import (
    DRAFT,
    TEXT_COLUMN,
    Place,
    Source,
    accessing,
    find_place,
    open_source,
    output_rows,
    output_schema,
    regrouped,
    write_output,
)
from tfexport.bulk.config import BulkConfig, Format, need_format
from tfexport.config import Config
from tfexport.errors import MAX_PROBLEMS, InputError, first_line, raise_all
from tfexport.generation import DecodeConfig
from tfexport.text.tokenizer import Tokenizer

FORMAT_VERSION = 2
SUFFIXES = ("", "_score", "_finish_reason", "_error")
NO_TEXT = "the row has no text"
_JOB, _TEXTS, _ROWS, _PART = "job.json", "texts.parquet", "rows.parquet", re.compile(r"part-(\d{8})\.parquet")
_PART_BYTES = 32 * 2**20
_TEXTS_SCHEMA = pyarrow.schema([("text", pyarrow.string())])


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

    def differences(self, former: Job) -> list[str]:
        """Describe each field that differs from an earlier run."""
        now, before = ({**data.pop("decoding"), **data} for data in (self.to_dict(), former.to_dict()))
        return [f"{name} is {now[name]!r} and was {before[name]!r}" for name in now if now[name] != before[name]]


@dataclass(frozen=True)
class Part:
    """Rows that are decoded and saved together; `number` and `first` count from 0."""

    number: int
    first: int
    count: int


class Store:
    """The folder of a run; each part is a Parquet file with the columns of `schema`."""

    def __init__(self, target: Place, form: Format, output_column: str, *, are_lists: bool) -> None:
        self.target, self.form = target, form
        self.folder = Place(target.system, f"{target.path}.parts", f"{target.name}.parts")
        kinds = [pyarrow.string(), pyarrow.float64(), pyarrow.string()]
        kinds = [*(map(pyarrow.list_, kinds) if are_lists else kinds), pyarrow.string()]
        self.schema = pyarrow.schema([(output_column + end, kind) for end, kind in zip(SUFFIXES, kinds, strict=True)])

    @cached_property
    def _texts(self) -> parquet.ParquetFile:
        return self._open(_TEXTS)

    @cached_property
    def parts(self) -> list[Part]:
        """All parts of the input."""
        counts = [self._texts.metadata.row_group(number).num_rows for number in range(self._texts.num_row_groups)]
        rows = zip(range(len(counts)), accumulate(counts, initial=0), counts, strict=False)
        return [Part(*row) for row in rows]

    def missing(self) -> list[Part]:
        """Return the unfinished parts."""
        with accessing(self.folder.name, "read"):
            names = self.folder.names()
        return [part for part in self.parts if _name(part) not in names]

    def texts(self, part: Part) -> list[str | None]:
        """Return the text of each row of a part; None if a row has no text."""
        texts: list[str | None] = self._read(_TEXTS, self._texts, part, part.number).column(0).to_pylist()
        return texts

    def save(self, part: Part, rows: Sequence[tuple[Any, ...]]) -> None:
        """Write a finished part; each row is a tuple of the values of `schema`."""
        table = pyarrow.table(list(zip(*rows, strict=True)), schema=self.schema)
        with self._writing(_name(part)) as stream:
            parquet.write_table(table, stream, compression="zstd", write_page_checksum=True)

    def finish(self) -> int:
        """Join the parts into the output, delete the folder, and count rows with errors."""
        num_errors = 0
        rows = None if self.form == ".txt" else self._open(_ROWS)
        schema = rows.schema_arrow if rows else pyarrow.schema([])
        for field in self.schema:
            schema = schema.append(field)

        def parts() -> Iterator[tuple[pyarrow.Table, pyarrow.Table]]:
            nonlocal num_errors
            for part in self.parts:
                with self._open(_name(part)) as file:
                    answers = self._read(_name(part), file, part, 0)
                num_errors += part.count - answers.column(3).null_count
                yield self._read(_ROWS, rows, part, part.number) if rows else answers, answers

        with self._writing() as stream:
            write_output(stream, self.form, schema, parts())
        self.remove()
        return num_errors

    def remove(self) -> None:
        """Delete the folder."""
        with accessing(self.folder.name, "written"):
            # The job first: if this is interrupted, the next run must not resume an incomplete folder.
            if _JOB in self.folder.names():
                (self.folder / _JOB).delete()
            self.folder.system.delete_dir(self.folder.path)

    @contextmanager
    def _writing(self, name: str = "") -> Iterator[pyarrow.NativeFile]:
        target = self.folder / name if name else self.target
        kept = f"repair that and run the same command again, finished parts are kept in {self.folder.name}"
        with (
            accessing(self.folder.name if name else target.name, "written", kept),
            self.folder.writing(target) as stream,
        ):
            yield stream

    def _open(self, name: str) -> parquet.ParquetFile:
        with self._undamaged(name):
            return parquet.ParquetFile((self.folder / name).open(), page_checksum_verification=True)

    def _read(self, name: str, file: parquet.ParquetFile, part: Part, group: int) -> pyarrow.Table:
        with self._undamaged(name):
            table = file.read_row_group(group)
            if table.num_rows != part.count or (name == _name(part) and not table.schema.equals(self.schema)):
                raise pyarrow.ArrowInvalid("it has other rows")
            return table

    @contextmanager
    def _undamaged(self, name: str) -> Iterator[None]:
        try:
            yield
        except (pyarrow.ArrowException, OSError) as error:
            file = "the folder" if name in (_TEXTS, _ROWS) else "it"
            problem = f"is damaged ({first_line(error)}); remove {file} and run the same command again"
            raise InputError(f"{self.folder.name}/{name} {problem}") from error

    # ---- staging

    def resumes(self, job: Job) -> bool:
        """Return whether the folder belongs to this job; empty it if it has no job.

        Raises:
            InputError: the folder belongs to another job, or has unknown files.
        """
        with accessing(self.folder.name, "written"):
            names = self.folder.names()
            drafts = {name for name in names if name.startswith(DRAFT)}
            if foreign := [name for name in names - drafts - {_JOB, _TEXTS, _ROWS} if not _PART.fullmatch(name)]:
                problem = f"has {min(foreign)}, which is not part of a run"
                raise InputError(f"{self.folder.name} {problem}; move it away, or choose another --output")
            if _JOB not in names:
                if names:
                    self.remove()
                self.folder.system.create_dir(self.folder.path)
                return False
            for draft in drafts:
                (self.folder / draft).delete()
            with (self.folder / _JOB).open() as stream:
                raw = stream.read()
        remedy, name = f"remove {self.folder.name} to start anew", f"{self.folder.name}/{_JOB}"
        former = unseal(raw, Job.from_dict, name=name, format_version=FORMAT_VERSION, remedy=remedy)
        if found := job.differences(former):
            problem = f"has the parts of another run ({'; '.join(found)})"
            raise InputError(f"{self.folder.name} {problem}; give the former options to resume it, or {remedy}")
        return True

    def stage(self, source: Source, name: str, column: str, tokenizer: Tokenizer, job: Job) -> None:
        """Write the texts and the staged rows in parts, and then the job.

        Raises:
            InputError: the output format cannot hold the rows, or a .txt output cannot hold errors of texts.
        """
        form, schema = self.form, output_schema(source, self.form)
        problems, num_rows = list[str](), 0

        def tables() -> Iterator[pyarrow.Table]:
            nonlocal num_rows
            for batch in source.batches():
                texts = source.texts(batch, column)
                if form == ".txt":
                    found = _text_problems(tokenizer, texts)
                    problems.extend(f"row {num_rows + place + 1}: {problem}" for place, problem in found.items())
                num_rows += len(texts)
                # Texts and staged rows are one table here, so that both files are divided into the same parts.
                columns = [pyarrow.array(texts, pyarrow.string()), *output_rows(batch, form, schema).columns]
                yield pyarrow.table(columns, list(map(str, range(len(columns)))))

        with ExitStack() as stack:
            try:
                files = {_TEXTS: _TEXTS_SCHEMA} | ({_ROWS: schema} if schema else {})
                streams = [stack.enter_context(self._writing(file)) for file in files]
                writers = [
                    stack.enter_context(
                        parquet.ParquetWriter(stream, kind, compression="zstd", write_page_checksum=True)
                    )
                    for stream, kind in zip(streams, files.values(), strict=True)
                ]
                for table in regrouped(tables(), job.rows_per_part, _PART_BYTES):
                    parts = table.columns[:1], table.columns[1:]
                    for writer, columns in zip(writers, parts, strict=False):
                        writer.write_table(pyarrow.table(columns, schema=writer.schema), len(table))
            except (pyarrow.ArrowException, OverflowError, ValueError) as error:
                problem = f"{form} cannot hold this ({first_line(error)})"
                raise InputError(f"{name}: {problem}; choose another format for --output") from error
            if problems:
                problems[MAX_PROBLEMS:] = ["and perhaps more"] if len(problems) > MAX_PROBLEMS else []
                problems.append("a .txt has no place for errors: repair the input, or write .jsonl")
            raise_all(InputError, name, problems)
        with self._writing(_JOB) as stream:
            stream.write(seal(job.to_dict()))


def _name(part: Part) -> str:
    return f"part-{part.number:08d}.parquet"


def _text_problems(tokenizer: Tokenizer, texts: Sequence[str | None]) -> dict[int, str]:
    """Return the error of each text that the model rejects, by its index."""
    try:
        tokenizer.encode([text or "" for text in texts])
    except InputError as error:
        if len(texts) == 1:
            return {0: error.reason}
        return {place: _text_problems(tokenizer, [texts[place]])[0] for place in sorted(error.indices)}
    return {}


@contextmanager
def prepared(
    source: str | PathLike[str],
    target: str | PathLike[str],
    config: BulkConfig,
    decoding: DecodeConfig,
    tokenizer: Tokenizer,
    bundle_sha256: str,
    backend: str,
    report: Callable[[str], None],
) -> Iterator[Store]:
    """Lock the output, check everything, and stage the input unless a run is resumed."""
    read, written = need_format(source, "input"), need_format(target, "output")
    place, aim = find_place(source), find_place(target)
    are_lists = decoding.num_return_sequences > 1
    if are_lists and written in (".csv", ".tsv"):
        raise InputError(f"num_return_sequences is above 1, and a cell of {written} holds one text; write .jsonl")
    store = Store(aim, written, config.output_column, are_lists=are_lists)
    with ExitStack() as stack:
        with accessing(aim.name, "written", "choose another place"):
            if place.is_same(aim):
                raise InputError(f"{aim.name} is also the input; choose another --output")
            if aim.is_local and Path(aim.path).is_dir():
                raise InputError(f"{aim.name}: is a directory, expected the name of a file; choose another place")
            if aim.is_local:  # object stores have no locks; two runs there only duplicate the work
                stack.enter_context(locked(Path(aim.path)))
        report(f"reading {place.name}")
        with accessing(place.name, "read"):
            stamp, input_sha256 = place.stamp(), place.sha256()
        job = Job(
            bundle_sha256=bundle_sha256,
            backend=backend,
            input_sha256=input_sha256,
            input_format=read,
            output_format=written,
            decoding=decoding,
            **{name: getattr(config, name) for name in ("input_column", "output_column", "prefix", "rows_per_part")},
        )
        if store.resumes(job):
            num_rows, left = (sum(part.count for part in parts) for parts in (store.parts, store.missing()))
            if num_rows > left:
                report(f"resuming a former run: {num_rows - left:,} of {num_rows:,} rows are done")
        else:
            try:
                with open_source(place, read) as opened:
                    column = _choose_column(opened.columns, config.input_column, place.name)
                    if written != ".txt" and (taken := [name for name in store.schema.names if name in opened.columns]):
                        problem = f"{place.name} already has the column {', '.join(taken)}"
                        raise InputError(f"{problem}; choose another name for the outputs with --output-column")
                    store.stage(opened, place.name, column, tokenizer, job)
                    if place.stamp() != stamp:
                        raise InputError(f"{place.name} was changed while it was read; run again")
            except BaseException:
                store.remove()
                raise
        yield store


def _choose_column(columns: Mapping[str, bool], given: str | None, name: str) -> str:
    texts = [column for column, has_texts in columns.items() if has_texts]
    listed = f"its columns with texts are {', '.join(texts)}" if texts else "it has no column with texts"
    if given is not None:
        if given in texts:
            return given
        problem = f"column {given} has no texts" if given in columns else f"there is no column {given}"
        raise InputError(f"{name}: {problem}, {listed}; choose one with --input-column")
    if len(texts) == 1:
        return texts[0]
    if TEXT_COLUMN in texts:
        return TEXT_COLUMN
    raise InputError(f"{name}: {listed}; choose one with --input-column")
