"""What may be generated next: penalties and bans on the candidates of a step.

They work as the logits processors of Hugging Face transformers, in the same
order, but on the best candidates instead of the whole vocabulary: a filter that
can only lower n tokens of a row leaves the best k of it among the k + n best.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from tfexport.config import DecodeConfig
from tfexport.runtime.session import Floats, Ids, Mask
from tfexport.spec import ModelSpec


@dataclass(frozen=True)
class Filters:
    """The penalties and bans of one configuration for one model."""

    config: DecodeConfig
    eos: int
    vocab: int

    @classmethod
    def of(cls, config: DecodeConfig, spec: ModelSpec) -> Filters:
        """Take what filtering needs of a model."""
        return cls(config, spec.tokens.eos, spec.vocab)

    def num_candidates(self, wanted: int, history_len: int) -> int:
        """Return how many candidates to ask for, so that the `wanted` best are among them after filtering."""
        config = self.config
        if config.repetition_penalty < 1:
            return self.vocab  # it raises scores: any token may become the best
        lowered = len(set(config.suppress_tokens)) + (config.min_new_tokens > 0)
        if config.repetition_penalty > 1 or config.no_repeat_ngram_size:
            lowered += history_len
        return min(wanted + lowered, self.vocab)

    def apply(self, history: Ids, num_new: int, token_ids: Ids, scores: Floats) -> tuple[Ids, Floats]:
        """Penalise and ban, then sort again.

        Args:
            history: start token, prefix and generated tokens, int64 [rows, len].
            num_new: generated tokens so far.
            token_ids: candidates, int64 [rows, num_candidates].
            scores: logits or log-probabilities, float32 [rows, num_candidates].

        Returns:
            Ids and scores, best first, equal scores in order of id; -inf is a ban.
        """
        config, start = self.config, scores
        if config.repetition_penalty != 1:
            penalised = np.where(scores < 0, scores * config.repetition_penalty, scores / config.repetition_penalty)
            scores = np.where(self._contains(history, token_ids), penalised, scores)
        if 0 < config.no_repeat_ngram_size <= history.shape[1]:
            banned = self._repeats(history, config.no_repeat_ngram_size)
            scores = np.where(self._contains(banned, token_ids), -np.inf, scores)
        if num_new < config.min_new_tokens:
            scores = np.where(token_ids == self.eos, -np.inf, scores)
        if config.suppress_tokens:
            scores = np.where(np.isin(token_ids, config.suppress_tokens), -np.inf, scores)
        if scores is start:
            return token_ids, scores
        order = np.lexsort((token_ids, -scores))
        return np.take_along_axis(token_ids, order, 1), np.take_along_axis(scores, order, 1)

    def _repeats(self, history: Ids, size: int) -> Ids:
        """Return the tokens that would repeat an n-gram of `history`, and `vocab` in the other places."""
        windows = sliding_window_view(history, size, axis=1)  # [rows, num_windows, size]
        newest = history[:, history.shape[1] + 1 - size :]
        matches = (windows[..., :-1] == newest[:, None]).all(-1)
        return np.where(matches, windows[..., -1], self.vocab)

    def _contains(self, members: Ids, token_ids: Ids) -> Mask:
        """Say which of `token_ids` [rows, k] are among the `members` [rows, n] of their row."""
        table: NDArray[np.bool_] = np.zeros((len(members), self.vocab + 1), np.bool_)
        np.put_along_axis(table, members, values=True, axis=1)
        return np.take_along_axis(table, token_ids, 1)
