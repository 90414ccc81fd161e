"""N-grams of a source and of the text so far: what followed the same tokens before may follow them again."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

# Tokens that have to be equal: of the source or the text, and where neither has so many, of the source alone.
SIZES = (3, 2)
IN_SOURCE, GOES_ON = 1, 0
# Tokens in a row that a copy may say otherwise before it is none any more.
MOST_CHANGED = 2
# Between the source and the text; no token.
_BORDER = -1


class PromptLookup:
    """Drafts of how a text goes on, copied from its source or from itself.

    A copy goes on where it is, also behind a token that it says otherwise: a word is corrected, or a name is another
    one. Else the longest n-gram counts that was there before, in the source the first one behind the newest copy, for
    texts copy their source from its beginning to its end, and in the text the newest.
    """

    def __init__(self, source_ids: Sequence[int]) -> None:
        """Take a source, of the same vocabulary as the text."""
        self._tokens: list[int] = []
        self._followers: dict[tuple[int, ...], list[int]] = {}
        self._copied = 0  # as far as the source has been copied
        self._next: int | None = None  # place of what follows in the copy
        self._changed = 0
        self._border = len(source_ids)
        self.extend(source_ids)
        self._tokens.append(_BORDER)

    def extend(self, tokens: Iterable[int]) -> None:
        """Lengthen the text."""
        for token in tokens:
            place = len(self._tokens)
            for size in (*SIZES, IN_SOURCE):
                if place >= size:
                    self._followers.setdefault(tuple(self._tokens[place - size :]), []).append(place)
            self._tokens.append(token)
            if self._next is not None:
                self._changed = 0 if self._tokens[self._next] == token else self._changed + 1
                self._next += 1
                if self._changed > MOST_CHANGED or self._next == self._border:
                    self._next = None

    def places(self) -> Iterator[tuple[int, int]]:
        """Yield places of what may follow, the likeliest first, each behind the number of tokens that are equal.

        It is `GOES_ON` where a copy goes on behind a token that it has said otherwise.
        """
        for size in SIZES:
            if found := self._followers.get(tuple(self._tokens[-size:])):
                yield size, self._nearest(found)
        if self._next is not None:
            yield GOES_ON, self._next
        found = self._followers.get(tuple(self._tokens[-IN_SOURCE:]), [])
        if found and found[0] < self._border:
            yield IN_SOURCE, self._nearest(found)

    def copy(self, place: int, count: int) -> list[int]:
        """Return up to `count` tokens from a place on, at least one; the text is a copy of these now.

        What comes to the end of the text goes on with the draft itself: a text may say the same again and again.
        """
        self._next, self._changed = place, 0
        if place < self._border:
            self._copied = place
            return self._tokens[place : min(place + count, self._border)]
        drafted = self._tokens[place : place + count]
        period = len(self._tokens) - place
        while len(drafted) < count:
            drafted.append(drafted[-period])
        return drafted

    def _nearest(self, places: list[int]) -> int:
        """Choose among places, which are in order."""
        if self._next is not None:
            at = bisect_left(places, self._next)
            if at < len(places) and places[at] == self._next:
                return self._next
        in_source = bisect_left(places, self._border)
        if not in_source:
            return places[-1]
        return places[min(bisect_left(places, self._copied, 0, in_source), in_source - 1)]
