"""A run in bulk on this machine, the whole way on one page."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike
from typing import Any

from tfexport.bulk.config import BulkConfig
from tfexport.bulk.decode import Decoder, need_tokenizer
from tfexport.bulk.task import prepared
from tfexport.errors import InputError
from tfexport.model import Model


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


def generate_file(
    model: Model,
    source: str | PathLike[str],
    target: str | PathLike[str],
    config: BulkConfig | None = None,
    *,
    report: Callable[[str], None] = lambda line: None,
    on_progress: Callable[[Progress], None] | None = None,
    **options: Any,
) -> Summary:
    """Generate for every row of a file, and write all of its columns with the answers to another.

    Each row of the input has one row of the output, at the same place, with what `Model.generate` answers to it in a
    call over all texts. A run that was killed is gone on with by the same call. The output appears when it is whole.

    Args:
        model: of a bundle.
        source: path or URI of the input, .parquet, .jsonl, .csv or .txt.
        target: of the output, in any of these formats; replaced if there is one.
        config: of the run; None for the defaults.
        report: told what happens.
        on_progress: told how far the run is, whenever rows are finished.
        options: fields of `DecodeConfig`, as `Model.generate` takes them.

    Raises:
        ConfigError: options that are unknown, out of range or contradictory.
        InputError: lists what is broken in the input, or the output cannot be written, or is another run's.
        BundleError: another process writes the output.
        BackendError: the backend failed; what is done is kept.
    """
    config = config or BulkConfig()
    if model.manifest is None:
        raise InputError("generate_file: the model is of no bundle, so that nobody could go on; use tfexport.load")
    tokenizer = need_tokenizer(model)
    decoder = Decoder(model, config, model.decoding(**options))
    bundle_sha256 = hashlib.sha256(model.manifest.to_bytes()).hexdigest()
    with prepared(
        source, target, config, decoder.decoding, tokenizer, bundle_sha256, model.session.backend, report
    ) as task:
        num_left = sum(part.count for part in task.missing)
        meter = Meter(task.scan.num_rows, task.scan.num_rows - num_left, on_progress)
        decoded = 0
        for part in task.missing:
            texts = task.source.read(part, [task.column]).column(task.column)
            answers = decoder.answers(texts, part.first, meter.add)
            task.check_unchanged()
            task.store.write(part, answers)
            meter.tell(decoded := decoded + part.count)
        rate = meter.rate()
        report(f"joining {task.scan.num_rows:,} rows into {task.target.name}")
        return Summary(task.scan.num_rows, num_left, task.finish(), rate)
