"""What a run asks of a format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from tfexport.bulk.formats.answer import Answer
from tfexport.bulk.places.place import Place

Format = Literal[".parquet", ".jsonl", ".csv", ".txt"]
# Of rows that are in memory at once, where nothing else asks for more.
PIECE_BYTES = 8 * 2**20
# Of files with one text a line, which has no name there.
TEXT_COLUMN = "text"


@dataclass(frozen=True)
class Part:
    """Rows that are decoded and kept together.

    Attributes:
        number: from 0.
        first: row of the input, from 0.
        count: of rows.
        start: byte where the first row begins, in formats whose rows lie one behind the other.
    """

    number: int
    first: int
    count: int
    start: int = 0


@dataclass(frozen=True)
class Scan:
    """What one reading of an input has found.

    Attributes:
        sha256: of all its bytes, hex.
        num_rows: in it.
        columns: their names, in order, and whether each can hold texts.
        parts: all of its rows.
    """

    sha256: str
    num_rows: int
    columns: Mapping[str, bool]
    parts: tuple[Part, ...]


class Rows(Protocol):
    """Some rows of an input, in order."""

    def __len__(self) -> int: ...

    def column(self, name: str) -> list[Any]:
        """Return what each row has in a column, None for nothing."""
        ...

    def objects(self) -> list[str]:
        """Spell each row as a JSON object, in one line."""
        ...

    def cells(self, columns: Sequence[str]) -> list[list[str]]:
        """Spell each row as texts, "" for nothing."""
        ...

    def table(self, schema: Any) -> Any:
        """Return them as a pyarrow.Table with a schema."""
        ...


class Source(Protocol):
    """A file that is read.

    Attributes:
        place: of it.
        row_name: what a row is called in messages, with its number from 1 in place of {}.
    """

    place: Place
    row_name: str

    def check_spelled(self, form: str) -> None:
        """Refuse rows that a text format cannot hold.

        Raises:
            InputError: lists the columns.
        """
        ...

    def scan(self, rows_per_part: int) -> Scan:
        """Read all of it once, and check its structure.

        Raises:
            InputError: lists what is broken.
        """
        ...

    def read(self, part: Part, columns: Sequence[str] | None = None) -> Iterator[Rows]:
        """Yield the rows of a part in pieces, all of their columns or some; cheapest in the order of the parts.

        A piece has about `PIECE_BYTES`, or one row where that has more.
        """
        ...

    def schema(self, scan: Scan) -> Any:
        """Return the pyarrow.Schema of its rows.

        Raises:
            InputError: a column holds what no one type can.
        """
        ...

    def close(self) -> None:
        """Close the file."""
        ...


class Sink(Protocol):
    """A file that is written."""

    def write(self, rows: Rows, answers: Sequence[Answer]) -> None:
        """Add rows with their answers."""
        ...

    def close(self) -> None:
        """Write what is left; the stream stays open."""
        ...

    def abandon(self) -> None:
        """Write nothing more, for what is there is thrown away."""
        ...


def cut(num_rows: int, rows_per_part: int, starts: Sequence[int] = ()) -> tuple[Part, ...]:
    """Divide rows into parts.

    Args:
        num_rows: of the input.
        rows_per_part: of each part but the last.
        starts: byte of the first row of each part, where it is known.
    """

    def parts() -> Iterator[Part]:
        for number, first in enumerate(range(0, num_rows, rows_per_part)):
            count = min(rows_per_part, num_rows - first)
            yield Part(number, first, count, starts[number] if starts else 0)

    return tuple(parts())
