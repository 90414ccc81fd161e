"""Biased prefixes: what a text is drawn towards for as long as it follows, instead of having to begin with it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from tfexport.decode.history import History
from tfexport.runtime.session import Floats, Ids, pad_right


class PrefixBias:
    """The prefixes that the rows of one search are biased towards, as `prefix_bias_beta` of CTranslate2 does.

    Where a row has followed its prefix, the next token t of the prefix has the probability (1 - beta) · p(t) + beta,
    every other token (1 - beta) · p. A row that has left its prefix, or come to its end, is decoded freely.

    Attributes:
        is_followed: whether any row of the history that `num_candidates` was asked with follows its prefix.
    """

    def __init__(self, beta: float, vocab: int) -> None:
        """Begin without a row; 0 as `beta` biases nothing."""
        self.is_followed = False
        self._beta, self._vocab, self._kept = beta, vocab, 0
        self._prefixes: list[Sequence[int]] = []
        self._next_ids: Ids = np.empty(0, np.int64)

    def add(self, prefixes: Iterable[Sequence[int]]) -> None:
        """Begin a row with each prefix, whose first token is the start token."""
        if self._beta:
            self._prefixes += prefixes

    def keep(self, rows: Ids) -> None:
        """Forget all rows but `rows`, int64 [new rows]."""
        if self._beta:
            self._prefixes = [self._prefixes[row] for row in rows.tolist()]

    def num_candidates(self, others: int, history: History) -> int:
        """Return how many candidates to ask for: all while a prefix is followed, whose token may be the worst of them.

        Args:
            others: as many are asked for without a prefix.
            history: start token and generated tokens of each row.
        """
        self.is_followed = False
        # Looked for only while some row is short enough to follow.
        if self._beta and min(history.lengths.tolist()) < max(map(len, self._prefixes)):
            self._next_ids, self._kept = self._find_next(history), others + 1
            self.is_followed = bool((self._next_ids >= 0).any())
        return self._vocab if self.is_followed else others

    def apply(self, token_ids: Ids, log_probs: Floats) -> tuple[Ids, Floats]:
        """Bias the rows that follow, and sort again; where none does, return the same.

        Args:
            token_ids: candidates, best first: the whole vocabulary, int64 [rows, vocab].
            log_probs: float32 [rows, vocab]; -inf is a ban, which a token of the prefix escapes.

        Returns:
            The best candidates, as many as without a prefix and one more, equal ones in order of id.
        """
        if not self.is_followed:
            return token_ids, log_probs
        follows = self._next_ids >= 0
        # The others stay in order: the token of the prefix goes in front of them, then to its place among the best.
        order = (token_ids != self._next_ids[:, None]).argsort(1, kind="stable")[:, : self._kept]
        token_ids, log_probs = np.take_along_axis(token_ids, order, 1), np.take_along_axis(log_probs, order, 1)
        log_probs[follows] += np.float32(math.log1p(-self._beta))
        log_probs[follows, 0] = np.logaddexp(log_probs[follows, 0], np.float32(math.log(self._beta)))
        order = np.lexsort((token_ids, -log_probs))
        return np.take_along_axis(token_ids, order, 1), np.take_along_axis(log_probs, order, 1)

    def _find_next(self, history: History) -> Ids:
        """Find the token that goes on with the prefix of each row, int64 [rows]; -1 for a row that does not follow."""
        prefixes, is_token = pad_right(self._prefixes, self._vocab)
        width, lengths = min(prefixes.shape[1], history.longest), history.lengths
        is_said = np.arange(width) < lengths[:, None]
        follows = (lengths < is_token.sum(1)) & ((prefixes[:, :width] == history.tokens[:, :width]) | ~is_said).all(1)
        places = lengths.clip(max=prefixes.shape[1] - 1)
        return np.where(follows, prefixes[np.arange(lengths.size), places], -1)
