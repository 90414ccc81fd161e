"""Run a file through a model on this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any

from tfexport.bulk._job import NO_TEXT, Meter, Part, Reader, Store, run_job
from tfexport.bulk.config import BulkConfig, Progress, Summary, format_of
from tfexport.contract import ModelSpec
from tfexport.decode.request import check_requests, check_sources
from tfexport.errors import BackendError, InputError, TfexportError
from tfexport.features.processor import FeatureProcessor
from tfexport.generation import DecodeConfig
from tfexport.model.inputs import read_features
from tfexport.model.model import Model, bundle_sha256
from tfexport.model.result import Result, check_copies
from tfexport.runtime.session import Limits
from tfexport.runtime.sources import stand_in
from tfexport.text.tokenizer import Tokenizer

READ_BATCHES = 4  # batches of audio or images whose features are in memory
_Answer = tuple[Any, Any, Any, str | None]  # texts, scores, finish reasons, error


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
    """Generate for every row of a file, and write its columns with the outputs.

    Row n of the output has row n of the input and its outputs, which equal those of one `Model.generate` call for all
    texts. If a run was killed, the same call resumes it. The output file appears only when it is complete.

    Args:
        model: an open model.
        source: path or URI of the input: .parquet, .jsonl, .csv, .tsv or .txt.
        target: path or URI of the output, in any of these formats; an existing file is replaced.
        config: settings of the run; None for the defaults.
        report: receives status lines.
        on_progress: called when rows are finished.
        options: fields of `DecodeConfig`, as in `Model.generate`.

    Raises:
        ConfigError: options are unknown, out of range or contradictory.
        InputError: lists what is invalid in the input, or the output cannot be written or belongs to another run.
        BundleError: another process is writing the output.
        BackendError: the backend failed; finished parts are kept.
    """
    config = config or BulkConfig()
    decoder = Decoder(model, config, decoding_of(model, target, options))

    def decode(store: Store, missing: Sequence[Part], meter: Meter) -> None:
        decoded = 0
        for part in missing:
            decoder.decode(store, part, meter.add)
            meter.set(decoded := decoded + part.count)

    reader = reader_of(model.spec, decoder.tokenizer, model.processor)
    facts = decoder.decoding, reader, bundle_sha256(model), model.session.backend
    return run_job(source, target, config, *facts, decode, report, on_progress)


def decoding_of(model: Model, target: str | PathLike[str], options: Mapping[str, Any]) -> DecodeConfig:
    """Return the decoding options; lines of one text for each input have no scores."""
    decoding = model.decoding(**options)
    has_scores = format_of(target) != ".txt" or decoding.num_return_sequences > 1
    return replace(decoding, return_scores=decoding.return_scores and has_scores)


def reader_of(spec: ModelSpec, tokenizer: Tokenizer, processor: FeatureProcessor | None) -> Reader:
    """Return how a model reads its sources."""
    if spec.source_vocab:
        return Reader(tokenizer.encode, takes_files=False)

    def check(sources: list[Any]) -> None:
        check_sources(spec, Limits.of(spec), "", read_features(processor, sources, paths=True))

    return Reader(check, takes_files=True)


class Decoder:
    """Decode parts with an open model."""

    def __init__(self, model: Model, config: BulkConfig, decoding: DecodeConfig) -> None:
        """Run all checks that need no text."""
        if model.tokenizer is None:
            raise InputError("this bundle has no tokenizer and reads no texts; export it with its tokenizer")
        self.tokenizer, self.decoding = model.tokenizer, decoding
        self._model, self._config = model, config
        if decoding.replace_unknowns:
            check_copies(model.session, model.tokenizer)
        begin, tokens = self.tokenizer.begin_target(config.prefix or ""), self.tokenizer
        source = [stand_in(model.spec.source)]
        check_requests(model.session, source, decoding, [begin], tokens.decode, len(tokens.text.target_prefix))

    def decode(self, store: Store, part: Part, on_progress: Callable[[int], None] | None = None) -> None:
        """Decode a part as one call for the whole input would, and save it."""
        texts = dict(enumerate(store.sources(part), part.first))
        found: dict[int, _Answer] = {row: (None, None, None, NO_TEXT) for row, text in texts.items() if text is None}
        rows = [row for row in texts if row not in found]
        # The features of all rows of a part could exceed the memory.
        size = len(rows) if self._model.reads == "text" else READ_BATCHES * self._config.batch_size
        for first in range(0, len(rows), max(size, 1)):
            found |= self._decode({row: texts[row] for row in rows[first : first + size]}, on_progress)
        store.save(part, [found[row] for row in texts])

    def _decode(self, texts: dict[int, Any], on_progress: Callable[[int], None] | None) -> dict[int, _Answer]:
        found = dict[int, _Answer]()
        while left := {row: text for row, text in texts.items() if row not in found}:
            try:
                found |= self._generate(left, on_progress)
            except TfexportError as error:
                if not error.indices:
                    raise
                for row in [list(left)[index] for index in error.indices]:
                    found[row] = self._generate_one(row, texts[row])
                if len(found) == len(texts) and isinstance(error, BackendError):
                    raise
        return found

    def _generate(self, texts: dict[int, Any], on_progress: Callable[[int], None] | None = None) -> dict[int, _Answer]:
        prefix = self._config.prefix
        results = self._model.generate(
            list(texts.values()),
            indices=list(texts),  # the seed of a text depends on its index
            prefixes=None if prefix is None else [prefix] * len(texts),
            batch_size=self._config.batch_size,
            on_progress=on_progress,
            config=self.decoding,
        )
        found: dict[int, list[Result]] = {row: [] for row in texts}
        for result in results:
            found[result.index].append(result)
        return {row: self._answer(results) for row, results in found.items()}

    def _generate_one(self, row: int, text: Any) -> _Answer:
        try:
            return self._generate({row: text})[row]
        except TfexportError as error:
            if not error.indices:
                raise
            return None, None, None, error.reason

    def _answer(self, results: Sequence[Result]) -> _Answer:
        columns = [[getattr(result, name) for result in results] for name in ("text", "score", "finish_reason")]
        texts, scores, ends = columns if self.decoding.num_return_sequences > 1 else [column[0] for column in columns]
        return texts, scores, ends, None
