"""Store the tokens of a search's rows in one array, each row at its own length."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from tfexport.runtime.session import ONE, Ids

# Initial room in tokens. It doubles when full, because few texts reach the limit.
FIRST_ROOM = 128


class Tokens(NamedTuple):
    """The tokens of some rows, with the names of `History`."""

    tokens: Ids
    lengths: Ids
    longest: int


class History:
    """Start token, prefix and generated tokens of every row; `fill` pads short rows."""

    def __init__(self, fill: int) -> None:
        self.lengths: Ids = np.empty(0, np.int64)  # tokens of each row
        self.newest: Ids = np.empty(0, np.int64)  # last token of each row
        self._fill = fill
        self._tokens: Ids = np.full((0, FIRST_ROOM), fill, np.int64)
        self._measure()

    @property
    def tokens(self) -> Ids:
        """All rows, int64 [rows, longest]; a view that the next step overwrites."""
        return self._tokens[:, : self.longest]

    def of(self, rows: Ids) -> Tokens:
        """Return the tokens of some rows."""
        lengths = self.lengths.take(rows)
        longest = max(lengths.tolist())
        return Tokens(self._tokens[:, :longest].take(rows, 0), lengths, longest)

    def add(self, prompts: Iterable[Sequence[int]]) -> None:
        new = list(prompts)
        lengths = [len(prompt) for prompt in new]
        longest = max(lengths)
        self._reserve(longest)
        block = np.full((len(new), self._tokens.shape[1]), self._fill, np.int64)
        block[:, :longest] = [[*prompt, *[self._fill] * (longest - len(prompt))] for prompt in new]
        self._tokens = np.concatenate((self._tokens, block)) if self.lengths.size else block
        self.lengths = np.concatenate((self.lengths, lengths))
        self.newest = np.concatenate((self.newest, [prompt[-1] for prompt in new]))
        self._measure()

    def append(self, token_ids: Ids) -> None:
        """Append its token to every row, int64 [rows]."""
        self._reserve(self.longest + 1)
        if self._is_even:  # writing a column is three times as fast
            self._tokens[:, self.longest] = token_ids
        else:
            self._tokens[self._rows, self.lengths] = token_ids
        self.newest = token_ids
        self.lengths = self.lengths + ONE
        self.longest += 1

    def extend(self, token_ids: Ids) -> None:
        """Append tokens to every row, int64 [tokens, rows], at least one."""
        count = len(token_ids)
        self._reserve(self.longest + count)
        self._tokens[self._rows[:, None], self.lengths[:, None] + np.arange(count)] = token_ids.T
        self.newest = token_ids[-1]
        self.lengths += count
        self.longest += count

    def with_room(self, count: int) -> Ids:
        """Return the tokens, [rows, longest + count or more], to write more in place."""
        self._reserve(self.longest + count)
        return self._tokens

    def written(self, count: int) -> None:
        """Take tokens that were written in place, equally many in every row."""
        self.lengths = self.lengths + count
        self.longest += count
        self.newest = self._tokens[self._rows, self.lengths - ONE]

    def branch(self, rows: Ids, token_ids: Ids) -> bool:
        """Continue row rows[r] as row r, all equally long; return whether any moved."""
        moves = rows.tobytes() != self._in_place  # the fastest comparison of a few numbers
        if moves:
            self._tokens[:, : self.longest] = self.tokens.take(rows, 0)
        self.append(token_ids)
        return moves

    def keep(self, rows: Ids) -> None:
        self._tokens, self.lengths, self.newest = self._tokens[rows], self.lengths[rows], self.newest[rows]
        self._measure()

    def row(self, row: int) -> list[int]:
        tokens: list[int] = self._tokens[row, : self.lengths[row]].tolist()
        return tokens

    def _measure(self) -> None:
        lengths = self.lengths.tolist()
        self.longest = max(lengths, default=0)
        self._rows, self._is_even = np.arange(len(lengths)), min(lengths, default=0) == self.longest
        self._in_place = self._rows.tobytes()

    def _reserve(self, length: int) -> None:
        room = self._tokens.shape[1]
        if length > room:
            more = np.full((len(self._tokens), max(room, length - room)), self._fill, np.int64)
            self._tokens = np.concatenate((self._tokens, more), 1)
