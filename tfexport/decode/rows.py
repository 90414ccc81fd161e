"""The rows of one batch on their way: history, cache and filters kept in step."""

from __future__ import annotations

from typing import Generic

import numpy as np

from tfexport.config import DecodeConfig
from tfexport.decode.filters import Filters
from tfexport.decode.request import Batch
from tfexport.errors import BackendError, InputError
from tfexport.runtime.session import Candidates, Floats, Ids, S, Session


class Rows(Generic[S]):
    """What is being decoded, one row a hypothesis.

    Attributes:
        history: start token, prefix and generated tokens, int64 [rows, len].
        texts: place in the call of each row's text, int64 [rows].
        num_new: generated tokens so far, the same in every row.
    """

    def __init__(self, session: Session[S], batch: Batch, config: DecodeConfig) -> None:
        """Encode the sources, one row each."""
        self.history, self.texts, self.num_new = batch.prompts, batch.texts, batch.num_forced
        self._session = session
        self._filters = Filters.of(config, session.spec)
        self._state = session.encode(batch.source_ids, batch.source_mask)

    def best(self, wanted: int, *, filter_logits: bool) -> tuple[Ids, Floats]:
        """Run the decoder on what it has not read yet.

        Args:
            wanted: how many tokens a row to choose from.
            filter_logits: filter before normalising, as greedy search and
                sampling do, or after it, as beam search does.

        Returns:
            Token ids int64 and filtered log-probabilities float32
            [rows, wanted or more], best first; fewer than wanted only where the
            vocabulary ends.

        Raises:
            BackendError: the model gave numbers that are none.
        """
        unread = self.history[:, self._state.past_len :]
        num_candidates = self._filters.num_candidates(wanted, self.history.shape[1])
        found = self._session.step(self._state, unread, num_candidates)
        self._check(found)
        log_normalizer = found.log_normalizer[:, None]
        scores = found.logits if filter_logits else found.logits - log_normalizer
        token_ids, scores = self._filters.apply(self.history, self.num_new, found.token_ids, scores)
        return token_ids, scores - log_normalizer if filter_logits else scores

    def follow(self, rows: Ids, token_ids: Ids) -> None:
        """Let row r continue what row rows[r] was with token_ids[r]; rows that no one continues leave."""
        if not np.array_equal(rows, np.arange(self._state.rows)):
            self._session.reorder(self._state, rows)
        self.history = np.concatenate((self.history[rows], token_ids[:, None]), 1)
        self.texts = self.texts[rows]
        self.num_new += 1

    def _check(self, found: Candidates) -> None:
        broken = np.isnan(found.logits).any(1) | ~np.isfinite(found.log_normalizer)
        if broken.any():
            texts = ", ".join(map(str, np.unique(self.texts[broken]) + 1))
            raise BackendError(
                f"decode: the model gave NaN or infinite logits for text {texts} at new token {self.num_new + 1}; "
                "check its weights, or export with --precision fp32"
            )


def nothing_left(text: int, num_new: int) -> InputError:
    """Say that every token of `text` is banned."""
    return InputError(
        f"decode: text {text + 1} has no token to choose from after {num_new} new ones; "
        "relax suppress_tokens, no_repeat_ngram_size or min_new_tokens"
    )
