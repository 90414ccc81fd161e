"""The rows of one batch on their way: history, cache and filters kept in step."""

from __future__ import annotations

from typing import Generic

import numpy as np

from tfexport.decode.config import DecodeConfig
from tfexport.decode.filters import Filters
from tfexport.decode.request import Batch
from tfexport.errors import BackendError, InputError
from tfexport.runtime.session import Candidates, Floats, Ids, RunsAhead, S, Session

# Room for this many new tokens at first; it doubles when it is full, for the limit may be far away.
FIRST_ROOM = 64


class Rows(Generic[S]):
    """What is being decoded, one row a hypothesis.

    Attributes:
        texts: place in the call of each row's text, int64 [rows].
        num_new: generated tokens so far, the same in every row.
    """

    def __init__(self, session: Session[S], batch: Batch, config: DecodeConfig) -> None:
        """Encode the sources, one row each."""
        self.texts, self.num_new = batch.texts, batch.num_forced
        num_rows, self._length = batch.prompts.shape
        self._tokens = np.empty((num_rows, self._length + FIRST_ROOM), np.int64)
        self._tokens[:, : self._length] = batch.prompts
        self._in_place = np.arange(num_rows)
        self._found: Candidates | None = None
        self._session = session
        self._filters = Filters(config, session.spec)
        self._state = session.encode(batch.source_ids, batch.source_mask)

    @property
    def history(self) -> Ids:
        """Start token, prefix and generated tokens, int64 [rows, len]; a view, which the next steps overwrite."""
        return self._tokens[:, : self._length]

    def best(self, wanted: int, *, filter_logits: bool) -> tuple[Ids, Floats]:
        """Run the decoder on what it has not read yet.

        Args:
            wanted: how many tokens a row to choose from.
            filter_logits: filter before normalising, as greedy search and
                sampling do, or after it, as beam search does.

        Returns:
            Token ids int64 and filtered log-probabilities float32
            [rows, wanted or more], best first; fewer than wanted only where the
            vocabulary ends. The ids are valid until the next call.

        Raises:
            BackendError: the model gave numbers that are none.
        """
        repeats = self._filters.repeats(self.history)
        num_candidates = self._filters.num_candidates(wanted, self._length, repeats)
        found, self._found = self._found or self._session.step(self._state, self._unread, num_candidates), None
        log_normalizer = found.log_normalizer[:, None]
        log_probs = found.logits - log_normalizer
        # Counting is the fastest question to a few numbers: `any` and `all` cost three times as much.
        if np.count_nonzero(np.isfinite(log_normalizer)) < log_normalizer.size or np.count_nonzero(np.isnan(log_probs)):
            self._refuse(found)
        if not self._filters.are_set:
            return found.token_ids, log_probs
        scores = found.logits if filter_logits else log_probs
        token_ids, scores = self._filters.apply(self.history, self.num_new, repeats, found.token_ids, scores)
        return token_ids, scores - log_normalizer if filter_logits else scores

    def run_ahead(self, steps: int) -> tuple[Ids, Floats]:
        """Take up to `steps` greedy steps at once, where session and filters allow it.

        The last of them, the first where a text may end, is left to `best`.

        Returns:
            The tokens of the others, int64, and their log-probabilities, float32,
            [steps taken - 1, rows]; every row is longer by them.

        Raises:
            BackendError: the model gave numbers that are none.
        """
        if not (isinstance(self._session, RunsAhead) and self._filters.leave_best):
            return np.empty((0, len(self._tokens)), np.int64), np.empty((0, len(self._tokens)), np.float32)
        num_candidates = self._filters.num_candidates(1, self._length, None)
        eos = self._session.spec.tokens.eos
        found = self._session.ahead(self._state, self._unread, num_candidates, steps, eos)
        token_ids, log_probs = found.token_ids[:-1, :, 0], found.logits[:-1, :, 0] - found.log_normalizer[:-1]
        if not np.isfinite(log_probs).all():
            first = int(np.isfinite(log_probs).all(1).argmin())
            self.num_new += first
            self._refuse(_at(found, first))
        for column in token_ids:
            self.append(column)
        self._found = _at(found, -1)
        return token_ids, log_probs

    def append(self, token_ids: Ids) -> None:
        """Lengthen every row by its token, int64 [rows]."""
        if self._length == self._tokens.shape[1]:
            self._tokens = np.concatenate((self._tokens, np.empty_like(self._tokens)), 1)
        self._tokens[:, self._length] = token_ids
        self._length += 1
        self.num_new += 1

    def select(self, rows: Ids) -> None:
        """Let row r continue what row rows[r] was, int64 [new_rows]; rows that no one continues leave."""
        if rows.tobytes() == self._in_place.tobytes():  # the fastest comparison of a few numbers
            return
        self._session.reorder(self._state, rows)
        taken = self._tokens[rows, : self._length]
        if rows.size != self._in_place.size:
            self._in_place = np.arange(rows.size)
            self._tokens = np.empty((rows.size, self._tokens.shape[1]), np.int64)
        self._tokens[:, : self._length] = taken
        self.texts = self.texts.take(rows)

    @property
    def _unread(self) -> Ids:
        return self._tokens[:, self._state.past_len : self._length]

    def _refuse(self, found: Candidates) -> None:
        broken = np.isnan(found.logits).any(1) | ~np.isfinite(found.log_normalizer)
        texts = ", ".join(map(str, np.unique(self.texts[broken]) + 1))
        raise BackendError(
            f"decode: the model gave NaN or infinite logits for text {texts} at new token {self.num_new + 1}; "
            "check its weights, or export with --precision fp32"
        )


def _at(found: Candidates, step: int) -> Candidates:
    return Candidates(found.token_ids[step], found.logits[step], found.log_normalizer[step])


def nothing_left(text: int, num_new: int) -> InputError:
    """Say that every token of `text` is banned."""
    return InputError(
        f"decode: text {text + 1} has no token to choose from after {num_new} new ones; "
        "relax suppress_tokens, no_repeat_ngram_size or min_new_tokens"
    )
