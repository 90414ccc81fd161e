"""A run in bulk on this machine, the whole way on one page."""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from typing import Any

from tfexport.bulk.config import BulkConfig
from tfexport.bulk.decode import Decoder, need_tokenizer
from tfexport.bulk.progress import Meter, Progress, Summary
from tfexport.bulk.task import check_unchanged, prepared, read_texts
from tfexport.model.model import Model, bundle_sha256


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
    tokenizer = need_tokenizer(model)
    decoder = Decoder(model, config, model.decoding(**options))
    sha256, backend = bundle_sha256(model), model.session.backend
    with prepared(source, target, config, decoder.decoding, tokenizer, sha256, backend, report) as task:
        num_left = sum(part.count for part in task.missing)
        meter = Meter(task.scan.num_rows, task.scan.num_rows - num_left, on_progress)
        decoded = 0
        for part in task.missing:
            texts = read_texts(task.source, part, task.column)
            answers = decoder.answers(texts, part.first, meter.add)
            check_unchanged(task.source.place, task.stamp, task.store.name)
            task.store.write(part, answers)
            meter.tell(decoded := decoded + part.count)
        rate = meter.rate()
        report(f"joining {task.scan.num_rows:,} rows into {task.target.name}")
        return Summary(task.scan.num_rows, num_left, task.finish(), rate)
