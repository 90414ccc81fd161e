"""Apply the logits processors that options need, in the order of transformers.

Rows of one kind share their processors, which apply to all of them at once. To add an option, add a field to
`DecodeConfig`, a processor, a line to `_processors`, and one to `kind_of`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence

import numpy as np

from tfexport.contract import ModelSpec
from tfexport.decode import _options as options
from tfexport.decode._history import History, Tokens
from tfexport.decode.request import Request
from tfexport.decode.result import Ends
from tfexport.generation import SAMPLING_OPTIONS, DecodeConfig
from tfexport.runtime.session import Candidates, Floats, Ids


class Processors:
    """The processors of rows of one kind, of which `config` is an example."""

    def __init__(self, config: DecodeConfig, spec: ModelSpec) -> None:
        self.ends, self._vocab = Ends(config.ends(spec.tokens.eos)), spec.vocab
        self._all = list(_processors(config, self.ends, spec))
        if config.renormalize_logits and self._all and not config.do_sample:  # otherwise they are normalized
            self._all.append(options.Renormalize())
        self._on_logits = [processor for processor in self._all if processor.takes_logits and config.num_beams == 1]
        self._on_log_probs = [processor for processor in self._all if processor not in self._on_logits]

    def __bool__(self) -> bool:
        return bool(self._all)

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end steps taken at once if they are the best."""
        return frozenset(self.ends.ids).union(*(processor.stop_ids for processor in self._all))

    @property
    def leave_best(self) -> bool:
        """Whether the best token stays the best, unless it is one of `stop_ids`."""
        return all(processor.leaves_best for processor in self._all)

    def steps_before_end(self, history: History, num_new: Ids) -> Ids | None:
        """Return in how many next steps each row may not end.

        It is None if other options change scores.
        """
        if not self._all:
            return np.zeros(history.lengths.size, np.int64)
        (first, *others) = self._all
        if others or not isinstance(first, options.MinLength) or len(self.ends.ids) >= self._vocab:
            return None
        return first.steps_before_end(history.lengths, num_new)

    def add(self, requests: Sequence[Request]) -> None:
        for processor in self._all:
            processor.add(requests)

    def keep(self, rows: Ids) -> None:
        for processor in self._all:
            processor.keep(rows)

    def num_candidates(self, wanted: int, history: History | Tokens) -> int:
        for processor in reversed(self._all):  # the last one receives what the others return
            wanted = processor.num_candidates(wanted, history)
        return min(wanted, self._vocab)

    def apply(self, found: Candidates, history: History | Tokens, num_new: Ids, limits: Ids) -> tuple[Ids, Floats]:
        """Process at least `num_candidates` candidates; return log-probabilities."""
        rows = options.Rows(history, num_new, limits, len(found.token_ids) // num_new.size)
        token_ids, scores = found.token_ids, found.logits
        for processor in self._on_logits:
            token_ids, scores = processor.apply(rows, token_ids, scores)
        log_probs = scores - found.log_normalizer[:, None]
        for processor in self._on_log_probs:
            token_ids, log_probs = processor.apply(rows, token_ids, log_probs)
        return token_ids, log_probs


def _processors(config: DecodeConfig, ends: Ends, spec: ModelSpec) -> Iterator[options.Processor]:
    """Yield the processors that the options need, in the order they apply."""
    vocab = spec.vocab
    if config.sequence_bias:
        yield options.SequenceBias(dict(config.sequence_bias), vocab)  # type: ignore[arg-type]  # pairs, as checked
    if config.repetition_penalty != 1:
        yield options.RepetitionPenalty(vocab)
    if config.no_repeat_ngram_size:
        yield options.NoRepeatNgram(vocab)
    if config.encoder_no_repeat_ngram_size:
        yield options.EncoderNoRepeatNgram(vocab)
    if words := _long_words(config):
        yield options.SequenceBias(dict.fromkeys(words, -np.inf), vocab)
    if config.bans_ends:
        yield options.MinLength(ends)
    if config.exponential_decay_length_penalty:
        yield options.FavoredEnd(config.exponential_decay_length_penalty, ends)
    yield from _banning(config, ends, spec)
    if config.prefix_bias_beta:
        yield options.PrefixBias(config.prefix_bias_beta, vocab)
    if config.forced_ends:
        yield options.ForcedEnd(config.forced_ends)


def _banning(config: DecodeConfig, ends: Ends, spec: ModelSpec) -> Iterator[options.Processor]:
    if _has_suppressed(config):
        yield options.Suppress(ends, spec.vocab)
    if config.begin_suppress_tokens:
        yield options.SuppressFirst(ends, spec.vocab)
    first_timestamp = spec.speech.first_timestamp if spec.speech else None
    if config.return_timestamps and first_timestamp is not None:
        yield options.Timestamps(first_timestamp, config.max_initial_timestamp_index, min(ends.ids))


def _long_words(config: DecodeConfig) -> tuple[tuple[int, ...], ...]:
    return tuple(word for word in config.bad_words_ids if len(word) > 1)


def _has_suppressed(config: DecodeConfig) -> bool:
    return bool(config.suppress_tokens) or len(_long_words(config)) < len(config.bad_words_ids)


def sampling_filters(config: DecodeConfig) -> tuple[str, ...]:
    """Return the filters of sampling that are set, in the order they apply."""
    return tuple(name for name in SAMPLING_OPTIONS[2:] if getattr(config, name) != getattr(DecodeConfig, name))


# Options whose values are equal in all rows of a kind.
_SHARED = operator.attrgetter(
    "sequence_bias",
    "exponential_decay_length_penalty",
    "return_timestamps",
    "max_initial_timestamp_index",
    "prefix_bias_beta",
    "forced_eos_token_id",
    "renormalize_logits",
    "eos_token_id",
    "do_sample",
)


def kind_of(config: DecodeConfig) -> object:
    """Return what has to be equal for two rows without beams to share processors."""
    penalty = config.repetition_penalty
    sampling = (config.top_k > 0, sampling_filters(config)) if config.do_sample else None
    return (
        _SHARED(config),
        (penalty > 1) - (penalty < 1),
        config.no_repeat_ngram_size > 0,
        config.encoder_no_repeat_ngram_size > 0,
        _long_words(config),
        config.bans_ends,
        _has_suppressed(config),
        bool(config.begin_suppress_tokens),
        sampling,
    )
