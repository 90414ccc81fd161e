"""End texts at stop strings and time limits, and stream pieces of text."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence

import numpy as np

from tfexport.decode.request import Request, TextOf
from tfexport.errors import BackendError
from tfexport.runtime.session import Ids, Mask

# Byte-level tokenizers decode an incomplete character to this.
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


def stop_end(token_ids: Sequence[int], strings: Sequence[str], text_of: TextOf) -> int | None:
    """Return the end of the earliest stop string that the last token has completed."""
    after = text_of(token_ids)
    if not any(string in after for string in strings):  # almost always, so skip decoding the text before
        return None
    before = text_of(token_ids[:-1])
    # Skip strings that were complete before. The last token may have changed the text before it.
    known = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False)))
    starts = [(after.find(string, max(0, known - len(string) + 1)), string) for string in strings]
    return min((start + len(string) for start, string in starts if start >= 0), default=None)


def is_stopped(request: Request, token_ids: Sequence[int]) -> bool:
    """Return whether the last token has completed a stop string."""
    strings = request.config.strings
    if not strings or request.text_of is None:
        return False
    try:
        return stop_end(token_ids, strings, request.text_of) is not None
    except Exception as error:  # raised by the tokenizer or by a function of the caller
        raise BackendError(
            f"decode: the tokens of {request.name} cannot be decoded to find stop strings: {error!r}; "
            "check the tokenizer, or leave stop_strings out",
            indices=[request.text],
        ) from error


class Deadlines:
    """Time limits of the sources of one search."""

    def __init__(self) -> None:
        self._ends: list[float] = []  # of time.monotonic()

    def add(self, requests: Sequence[Request]) -> None:
        """Append sources; their time limits start now."""
        now = time.monotonic()
        limits = (request.config.max_time for request in requests)
        self._ends += [math.inf if limit is None else now + limit for limit in limits]

    def keep(self, sources: Ids) -> None:
        """Remove all other sources."""
        self._ends = [self._ends[source] for source in sources.tolist()]

    def are_late(self) -> Mask:
        """Return which sources have exceeded their time limit, bool [sources]."""
        late: Mask = time.monotonic() > np.array(self._ends)
        return late


class Pieces:
    """Decode a text whose tokens arrive one by one, the first `prefix_len` a prefix."""

    def __init__(self, text_of: TextOf, prefix_len: int = 0, strings: Sequence[str] = ()) -> None:
        self._text_of, self._prefix_len, self._strings = text_of, prefix_len, strings
        self._seen: list[int] = []
        self._returned = self.text = ""  # `text` includes the part that has not been returned

    def push(self, token: int) -> str:
        """Add a token; return the next piece, empty while a character is incomplete."""
        self._seen.append(token)
        may_stop = self._strings and len(self._seen) > self._prefix_len
        end = stop_end(self._seen, self._strings, self._text_of) if may_stop else None
        self.text = self._text_of(self._seen)[:end]
        if self.text.endswith(INCOMPLETE) or not self.text.startswith(self._returned):
            return ""
        return self.rest()

    def rest(self) -> str:
        """Return the part of the text that has not been returned."""
        piece = self.text[len(self._returned) :]
        self._returned = self.text
        return piece
