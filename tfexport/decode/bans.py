"""Tokens that would complete what a text may not say: an n-gram of it or its source, or a sequence that is banned."""

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


class SourceNgrams:
    """The n-grams of each row's source, which its text may not hold."""

    def __init__(self, size: int, vocab: int) -> None:
        """Begin without a row; 0 as the size bans nothing."""
        self._size, self._vocab = size, vocab
        self._sources: list[Sequence[int]] = []

    def add(self, sources: Iterable[Sequence[int]]) -> None:
        """Begin a row with each source."""
        if self._size:
            self._sources += sources

    def keep(self, rows: Ids) -> None:
        """Forget all rows but `rows`, int64 [new rows]."""
        if self._size:
            self._sources = [self._sources[row] for row in rows.tolist()]

    def completions(self, history: History) -> list[Ids]:
        """Find the tokens that would complete an n-gram of the source; see `repeats`."""
        if not self._size:
            return []
        lengths = np.array([len(source) for source in self._sources])
        tokens = np.full((len(lengths), lengths.max()), self._vocab)
        for row, source in zip(tokens, self._sources, strict=True):
            row[: len(source)] = source
        # A source may be of another vocabulary: what no text can say is no ban.
        tokens = tokens.clip(max=self._vocab)
        return _completions(tokens, lengths, history, self._size, self._vocab)


def repeats(history: History, size: int, vocab: int) -> list[Ids]:
    """Find the tokens that would repeat an n-gram of `size` tokens.

    Returns:
        Nothing, or int64 [rows, num_ngrams], the size of the vocabulary in the places of no token.
    """
    return _completions(history.tokens, history.lengths, history, size, vocab)


def _completions(tokens: Ids, lengths: Ids, history: History, size: int, vocab: int) -> list[Ids]:
    """Find how the n-grams of `tokens`, `lengths` of each row, go on that begin as the history ends; see `repeats`."""
    num_ngrams = tokens.shape[1] - size + 1
    if num_ngrams < 1:
        return []
    # What a row's next token would complete: its last size - 1 tokens.
    begun = _newest(history, size - 1)
    matches: Mask = (np.arange(num_ngrams) <= lengths[:, None] - size) & (history.lengths >= size - 1)[:, None]
    for place in range(size - 1):
        matches &= tokens[:, place : place + num_ngrams] == begun[:, place, None]
    return [np.where(matches, tokens[:, size - 1 :], vocab)] if matches.any() else []


def _newest(history: History, count: int) -> Ids:
    """Return the last tokens of each row, int64 [rows, count]; anything for a row that has not so many."""
    places = history.lengths[:, None] - np.arange(count, 0, -1)
    return np.take_along_axis(history.tokens, places.clip(min=0), 1)
