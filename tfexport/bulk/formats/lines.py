"""Files with one text a line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import BinaryIO

from tfexport.bulk.formats.answer import Answer
from tfexport.bulk.formats.format import TEXT_COLUMN, Rows
from tfexport.bulk.formats.records import DictRows, Record, RecordSource


class LineSource(RecordSource[str]):
    r"""Reads one text a line; lines end with \n or \r\n and nothing else."""

    def _begin(self, lines: Iterator[bytes], columns: dict[str, bool]) -> int:
        columns[TEXT_COLUMN] = True
        return 0

    def _records(self, lines: Iterator[bytes]) -> Iterator[Record[str]]:
        for number, line in enumerate(lines, 1):
            try:
                yield Record(number, len(line), line.removesuffix(b"\n").removesuffix(b"\r").decode())
            except UnicodeDecodeError:
                problem = "is not UTF-8; convert the file, for example with iconv -t utf-8"
                yield Record(number, len(line), None, problem)

    def _columns(self, seen: dict[str, bool], value: str) -> None:
        pass

    def _rows(self, values: Sequence[str]) -> Rows:
        return DictRows([{TEXT_COLUMN: value} for value in values])


class LineSink:
    """Writes one answer a line, or where a row has several one line each, with number of the row and score."""

    def __init__(self, stream: BinaryIO, *, are_lists: bool) -> None:
        """Begin with an empty file."""
        self._stream, self._are_lists, self._num_rows = stream, are_lists, 0

    def write(self, rows: Rows, answers: Sequence[Answer]) -> None:
        """Add answers; the rows are left out."""
        lines = []
        for number, answer in enumerate(answers, self._num_rows + 1):
            for text, score in zip(answer.texts, answer.scores, strict=True):
                lines.append(answer_line(text, number if self._are_lists else None, score))
        self._num_rows += len(answers)
        self._stream.write("".join(f"{line}\n" for line in lines).encode())

    def close(self) -> None:
        """Do nothing."""

    def abandon(self) -> None:
        """Do nothing."""


def answer_line(text: str, number: int | None, score: float) -> str:
    """Spell an answer in one line; with the number of its input, from 1, and its score where there is a number."""
    line = " ".join(text.splitlines())
    return line if number is None else f"{number}\t{score:z.4f}\t{line}"
