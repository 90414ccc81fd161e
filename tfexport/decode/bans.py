"""Tokens that would complete what a text may not say: a repeated n-gram, or a sequence that is banned."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from tfexport.decode.history import History
from tfexport.runtime.session import Ids, Mask


class _Alike(NamedTuple):
    """Banned sequences of one length: how they begin, int64 [sequences, length - 1], and how each ends."""

    begun: Ids
    last: Ids


class BannedSequences:
    """Sequences of two tokens or more that no text may hold: their last token is banned where the others stand."""

    def __init__(self, sequences: Iterable[Sequence[int]], vocab: int) -> None:
        """Sort the sequences by their lengths."""
        self._vocab = vocab
        by_length: dict[int, list[Sequence[int]]] = {}
        for sequence in sequences:
            by_length.setdefault(len(sequence), []).append(sequence)
        every = (np.array(alike, np.int64) for alike in by_length.values())
        self._alike = [_Alike(alike[:, :-1], alike[:, -1]) for alike in every]

    def completions(self, history: History) -> list[Ids]:
        """Find the tokens that would complete one; see `repeats`."""
        found = []
        for begun, last in self._alike:
            size = begun.shape[1]
            matches = (_newest(history, size)[:, None] == begun).all(-1) & (history.lengths >= size)[:, None]
            if matches.any():
                found.append(np.where(matches, last, self._vocab))
        return found


def repeats(history: History, size: int, vocab: int) -> list[Ids]:
    """Find the tokens that would repeat an n-gram of `size` tokens.

    Returns:
        Nothing, or int64 [rows, num_ngrams], the size of the vocabulary in the places of no token.
    """
    tokens, lengths = history.tokens, history.lengths
    num_ngrams = tokens.shape[1] - size + 1
    if num_ngrams < 1:
        return []
    # What a row's next token would complete: its last size - 1 tokens.
    begun = _newest(history, size - 1)
    matches: Mask = np.arange(num_ngrams) <= lengths[:, None] - size
    for place in range(size - 1):
        matches &= tokens[:, place : place + num_ngrams] == begun[:, place, None]
    return [np.where(matches, tokens[:, size - 1 :], vocab)] if matches.any() else []


def _newest(history: History, count: int) -> Ids:
    """Return the last tokens of each row, int64 [rows, count]; anything for a row that has not so many."""
    places = history.lengths[:, None] - np.arange(count, 0, -1)
    return np.take_along_axis(history.tokens, places.clip(min=0), 1)
