"""How far a run is, and what it has done."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """How far a run is.

    Attributes:
        num_rows: of the input.
        done: of them, those of former runs too.
        rows_per_s: of this run; 0 at its beginning.
        left_s: seconds until the last row is decoded, at this rate; None where there is no rate yet.
    """

    num_rows: int
    done: int
    rows_per_s: float
    left_s: float | None


@dataclass(frozen=True)
class Summary:
    """What a run has done.

    Attributes:
        num_rows: of the output.
        num_decoded: of them, by this run.
        num_errors: rows that have an error in place of an answer.
        rows_per_s: at which this run has decoded.
    """

    num_rows: int
    num_decoded: int
    num_errors: int
    rows_per_s: float


class Meter:
    """Counts rows and tells how far a run is."""

    def __init__(self, num_rows: int, done: int, on_progress: Callable[[Progress], None] | None) -> None:
        """Begin to count, and to take the time."""
        self._num_rows, self._former, self._on_progress = num_rows, done, on_progress
        self._began, self._decoded = time.perf_counter(), 0

    def add(self, rows: int) -> None:
        """Count rows that were decoded."""
        self.tell(self._decoded + rows)

    def tell(self, decoded: int) -> None:
        """Set the number of rows that were decoded."""
        self._decoded = decoded
        if self._on_progress:
            done = self._former + decoded
            rate = self.rate()
            left_s = (self._num_rows - done) / rate if rate else None
            self._on_progress(Progress(self._num_rows, done, rate, left_s))

    def rate(self) -> float:
        """Return the rows a second so far."""
        return self._decoded / max(time.perf_counter() - self._began, 1e-9)
