"""What ends a text beside its end tokens and its limit: a string that it says, or the time."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence

import numpy as np

from tfexport.generation import DecodeConfig
from tfexport.runtime.session import Ids, Mask

TextOf = Callable[[Sequence[int]], str]


def stop_end(token_ids: Sequence[int], strings: Sequence[str], text_of: TextOf) -> int | None:
    """Find the stop string that the last token has completed.

    Args:
        token_ids: of the text, without the start token.
        strings: any of which ends a text.
        text_of: decodes token ids.

    Returns:
        Where it ends in the text of all tokens, the earliest of several; None where none was completed.
    """
    after = text_of(token_ids)
    if not any(string in after for string in strings):  # as behind nearly every token: what was before does not matter
        return None
    before = text_of(token_ids[:-1])
    # What was there already has ended nothing; the last token may have changed the text before it.
    known = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False)))
    starts = [(after.find(string, max(0, known - len(string) + 1)), string) for string in strings]
    return min((start + len(string) for start, string in starts if start >= 0), default=None)


class Stops:
    """Strings and time that end the sources of one search.

    Attributes:
        are_set: whether there are any.
    """

    def __init__(self, config: DecodeConfig) -> None:
        """Begin without a source."""
        self._strings, self._max_time = config.strings, config.max_time
        self.are_set = bool(self._strings) or self._max_time is not None
        self._deadlines = np.empty(0)

    def add(self, count: int) -> None:
        """Let the time of `count` sources begin."""
        deadline = np.inf if self._max_time is None else time.monotonic() + self._max_time
        self._deadlines = np.concatenate((self._deadlines, np.full(count, deadline)))

    def keep(self, kept: Ids) -> None:
        """Forget all sources but `kept`, int64 [new sources]."""
        self._deadlines = self._deadlines[kept]

    def are_late(self) -> Mask:
        """Say whose time is over, bool [sources]."""
        late: Mask = time.monotonic() > self._deadlines
        return late

    def are_said(self, token_ids: Sequence[int], text_of: TextOf | None) -> bool:
        """Say whether the last token has completed a stop string; see `stop_end`."""
        return text_of is not None and bool(self._strings) and stop_end(token_ids, self._strings, text_of) is not None
