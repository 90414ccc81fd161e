"""What may be generated next: penalties and bans on the candidates of a step.

They work as the logits processors of Hugging Face transformers, in the same
order, but on the best candidates instead of the whole vocabulary: a filter that
can only lower n tokens of a row leaves the best k of it among the k + n best.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from tfexport.decode.history import History
from tfexport.generation import DecodeConfig
from tfexport.runtime.session import Floats, Ids, Mask
from tfexport.spec import ModelSpec


class Filters:
    """The penalties and bans of one configuration for one model, for the rows of one search.

    Attributes:
        are_set: whether there is one that could change anything.
        leave_best: whether the best token stays the best wherever it does not end the text.
    """

    def __init__(self, config: DecodeConfig, spec: ModelSpec) -> None:
        """Prepare what stays the same from step to step."""
        self._config, self._eos, self._vocab = config, spec.tokens.eos, spec.vocab
        self._penalises = config.repetition_penalty != 1
        self._num_banned = len(set(config.suppress_tokens)) + (config.min_new_tokens > 0)
        self.are_set = self._penalises or config.no_repeat_ngram_size > 0 or self._num_banned > 0
        self.leave_best = not (self._penalises or config.no_repeat_ngram_size or config.suppress_tokens)
        self._suppressed: NDArray[np.bool_] | None = None
        if config.suppress_tokens:
            self._suppressed = np.zeros(spec.vocab, np.bool_)
            self._suppressed[list(config.suppress_tokens)] = True
        self._repeats: Ids | None = None  # of the history that was asked with last
        self._marks: NDArray[np.bool_] = np.zeros((0, spec.vocab + 1), np.bool_)

    def num_candidates(self, wanted: int, history: History) -> int:
        """Return how many candidates to ask for, so that the `wanted` best are among them after filtering."""
        if self._config.no_repeat_ngram_size:
            self._repeats = self._find_repeats(history)
        if self._config.repetition_penalty < 1:
            return self._vocab  # it raises scores: any token may become the best
        lowered = self._num_banned
        if self._config.repetition_penalty > 1:
            lowered += history.longest
        elif self._repeats is not None:
            lowered += int((self._repeats < self._vocab).sum(1).max())
        return min(wanted + lowered, self._vocab)

    def apply(self, history: History, num_new: Ids, token_ids: Ids, scores: Floats) -> tuple[Ids, Floats]:
        """Penalise and ban, then sort again.

        Args:
            history: the one that `num_candidates` was asked with.
            num_new: tokens that each row has generated so far, int64 [rows].
            token_ids: candidates, int64 [rows, num_candidates].
            scores: logits or log-probabilities, float32 [rows, num_candidates].

        Returns:
            Ids and scores, best first, equal scores in order of id; -inf is a ban.
        """
        if self._penalises:
            penalty = self._config.repetition_penalty
            penalised = np.where(scores < 0, scores * penalty, scores / penalty)
            scores = np.where(self._contains(history.tokens, token_ids), penalised, scores)
        banned = self._banned(num_new, token_ids)
        if banned is not None:
            scores = np.where(banned, -np.inf, scores)
        if self._penalises:
            order = np.lexsort((token_ids, -scores))
        elif banned is not None:
            order = banned.argsort(1, kind="stable")  # the others are in order already
        else:
            return token_ids, scores
        return np.take_along_axis(token_ids, order, 1), np.take_along_axis(scores, order, 1)

    def _find_repeats(self, history: History) -> Ids | None:
        """Find the tokens that would repeat an n-gram.

        Returns:
            int64 [rows, num_ngrams], the size of the vocabulary in the places of no token; None where none would.
        """
        size, tokens, lengths = self._config.no_repeat_ngram_size, history.tokens, history.lengths
        num_ngrams = tokens.shape[1] - size + 1
        if num_ngrams < 1:
            return None
        # What a row's next token would complete: its last size - 1 tokens.
        newest = lengths[:, None] - np.arange(size - 1, 0, -1)
        begun = np.take_along_axis(tokens, newest.clip(min=0), 1)
        matches: Mask = np.arange(num_ngrams) <= lengths[:, None] - size
        for place in range(size - 1):
            matches &= tokens[:, place : place + num_ngrams] == begun[:, place, None]
        return np.where(matches, tokens[:, size - 1 :], self._vocab) if matches.any() else None

    def _banned(self, num_new: Ids, token_ids: Ids) -> Mask | None:
        """Say which candidates may not come next, None where all may."""
        masks: list[Mask] = []
        if self._repeats is not None:
            masks.append(self._contains(self._repeats, token_ids))
        least = self._config.min_new_tokens
        if least and min(lengths := num_new.tolist()) < least:  # sooner than numpy's for the rows of a batch
            ends: Mask = token_ids == self._eos
            masks.append(ends if max(lengths) < least else ends & (num_new < least)[:, None])
        if self._suppressed is not None:
            masks.append(self._suppressed[token_ids])
        if not masks:
            return None
        banned = functools.reduce(np.logical_or, masks)
        return banned if np.count_nonzero(banned) else None

    def _contains(self, members: Ids, token_ids: Ids) -> Mask:
        """Say which of `token_ids` [rows, k] are among the `members` [rows, n] of their row."""
        # A table of the vocabulary a row is large: it is kept, and only what was marked is cleared.
        if len(self._marks) < len(members):
            self._marks = np.zeros((len(members), self._vocab + 1), np.bool_)
        marks = self._marks[: len(members)]
        np.put_along_axis(marks, members, values=True, axis=1)
        found: Mask = np.take_along_axis(marks, token_ids, 1)
        np.put_along_axis(marks, members, values=False, axis=1)
        return found
