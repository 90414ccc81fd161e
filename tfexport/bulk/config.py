"""What a run in bulk is told besides how to decode."""

from __future__ import annotations

from collections.abc import Iterator

from tfexport.config import Config

MAX_ROWS_PER_PART = 1_000_000


class BulkConfig(Config, subject="bulk"):
    """What a run in bulk is told besides how to decode.

    Attributes:
        input_column: that has the texts; None for the only one with texts, or the one called "text".
        output_column: that gets the answers; three more begin with its name.
        prefix: what every answer begins with; None for nothing.
        batch_size: texts decoded at once; no answer depends on it.
        rows_per_part: rows that are kept, or lost by a kill, together; they are decoded longest first.
    """

    input_column: str | None = None
    output_column: str = "output"
    prefix: str | None = None
    batch_size: int = 32
    rows_per_part: int = 2048

    def _problems(self) -> Iterator[str]:
        if self.input_column == "":
            yield "input_column is empty, expected a name"
        if not self.output_column:
            yield "output_column is empty, expected a name"
        if self.batch_size < 1:
            yield f"batch_size is {self.batch_size}, expected 1 or more"
        if not 1 <= self.rows_per_part <= MAX_ROWS_PER_PART:
            yield f"rows_per_part is {self.rows_per_part}, expected 1 to {MAX_ROWS_PER_PART}"
