"""A run from its two ends: everything is checked before the first row is decoded, and joined behind the last."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from os import PathLike
from typing import Any, BinaryIO

from tfexport.bulk.config import BulkConfig
from tfexport.bulk.decode import text_problems
from tfexport.bulk.formats.answer import AnswerColumns
from tfexport.bulk.formats.format import Part, Scan, Sink, Source
from tfexport.bulk.formats.registry import need_format, open_source, sink_of
from tfexport.bulk.job import Job, PartStore, close_job, open_job
from tfexport.bulk.places.find import find_place
from tfexport.bulk.places.place import Place, reading, writing
from tfexport.errors import MAX_PROBLEMS, InputError, raise_all
from tfexport.generation import DecodeConfig
from tfexport.text.tokenizer import Tokenizer

_USUAL_COLUMN = "text"


@dataclass(frozen=True)
class Task:
    """A run that is prepared.

    Attributes:
        source: that is read.
        target: that is written.
        scan: of the source.
        column: of it that has the texts.
        store: of the parts that are done.
        missing: parts that are to be decoded.
        stamp: of the source when it was read.
    """

    source: Source
    target: Place
    scan: Scan
    column: str
    store: PartStore
    missing: tuple[Part, ...]
    stamp: tuple[int, int]
    _open_sink: Callable[[BinaryIO], Sink]

    def finish(self) -> int:
        """Join the input with the answers, put the output in its place and remove the parts.

        Returns:
            The number of rows that have an error.

        Raises:
            InputError: the input was changed since, a part is damaged, or the output cannot be written.
        """
        num_errors = 0
        with writing(self.target.name, kept=self.store.name):
            with self.target.parts.publish() as stream:
                sink = self._open_sink(stream)
                try:
                    for part in self.scan.parts:
                        answers = self.store.read(part)
                        num_errors += sum(answer.error is not None for answer in answers)
                        left = iter(answers)
                        for rows in self.source.read(part):
                            sink.write(rows, list(islice(left, len(rows))))
                    check_unchanged(self.source.place, self.stamp, self.store.name)
                    sink.close()
                except BaseException:
                    sink.abandon()
                    raise
            close_job(self.target.parts)
        return num_errors


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
) -> Iterator[Task]:
    """Read the input once, check what can be checked, and find what a former run has done; under the output's lock.

    Args:
        source: path or URI of the input.
        target: of the output.
        config: of the run.
        decoding: how is decoded.
        tokenizer: of the bundle.
        bundle_sha256: of its manifest.
        backend: that runs it.
        report: told what happens.

    Raises:
        InputError: lists what is wrong with the input, or the output cannot be written, or is another run's.
        BundleError: another process writes the output.
    """
    read, written = need_format(source, "input"), need_format(target, "output")
    place, aim = find_place(source), find_place(target)
    if place.name == aim.name:
        raise InputError(f"{aim.name} is the input too; choose another --output")
    with aim.locked(), closing(open_source(place, read)) as opened:
        report(f"reading {place.name}")
        with reading(place.name):
            stamp = place.stamp()
        scan = opened.scan(config.rows_per_part)
        column = choose_column(scan.columns, config.input_column, place.name)
        open_sink = sink_of(
            written, opened, scan, AnswerColumns(config.output_column, decoding.num_return_sequences > 1)
        )
        with writing(aim.name):
            is_begun = bool(aim.parts.names())
        if written == ".txt" and not is_begun:
            _check_texts(opened, scan, column, tokenizer)
        job = Job(
            bundle_sha256=bundle_sha256,
            backend=backend,
            input_sha256=scan.sha256,
            input_format=read,
            input_column=column,
            output_format=written,
            output_column=config.output_column,
            prefix=config.prefix,
            rows_per_part=config.rows_per_part,
            decoding=decoding,
        )
        store = open_job(aim.parts, job)
        done = store.done()
        missing = tuple(part for part in scan.parts if part.number not in done)
        if done:
            kept = sum(part.count for part in scan.parts) - sum(part.count for part in missing)
            report(f"going on behind a former run: {kept:,} of {scan.num_rows:,} rows are done")
        yield Task(opened, aim, scan, column, store, missing, stamp, open_sink)


def check_unchanged(place: Place, stamp: tuple[int, int], parts: str) -> None:
    """Refuse an input that is no more what was checked; called before what was read of it is kept.

    Args:
        place: of the input.
        stamp: that it had.
        parts: the folder of the run.

    Raises:
        InputError: it was written since.
    """
    with reading(place.name):
        if place.stamp() != stamp:
            raise InputError(
                f"{place.name} was changed during the run; put back what it was and run again to go on, or remove "
                f"{parts} to begin anew"
            )


def read_texts(source: Source, part: Part, column: str) -> list[Any]:
    """Return what the rows of a part have in the column with the texts."""
    return [text for rows in source.read(part, [column]) for text in rows.column(column)]


def choose_column(columns: Mapping[str, bool], given: str | None, name: str) -> str:
    """Return the column with the texts: the one that is given, the only one, or the one called "text".

    Args:
        columns: of the input, and whether each has texts.
        given: by the caller, or None.
        name: of the input, for the error.

    Raises:
        InputError: it is missing, or there are several; names those there are.
    """
    texts = [column for column, has_texts in columns.items() if has_texts]
    listed = f"its columns with texts are {', '.join(texts)}" if texts else "it has no column with texts"
    if given is not None:
        if given not in columns:
            raise InputError(f"{name} has no column {given}, {listed}; choose one with --input-column")
        if given not in texts:
            raise InputError(f"{name}: column {given} has no texts, {listed}; choose one with --input-column")
        return given
    if len(texts) == 1:
        return texts[0]
    if _USUAL_COLUMN in texts:
        return _USUAL_COLUMN
    raise InputError(f"{name}: {listed}; choose one with --input-column")


def _check_texts(source: Source, scan: Scan, column: str, tokenizer: Tokenizer) -> None:
    """Refuse an input whose answers lines alone cannot hold, before anything is decoded."""
    problems: list[str] = []
    for part in scan.parts:
        for place, problem in text_problems(tokenizer, read_texts(source, part, column)):
            problems.append(f"{source.row_name.format(part.first + place + 1)}: {problem}")
        if len(problems) > MAX_PROBLEMS:
            problems[MAX_PROBLEMS:] = ["and perhaps more"]
            break
    if problems:
        problems.append("an output of lines has no place for errors: repair the input, or write .jsonl")
    raise_all(InputError, source.place.name, problems)
