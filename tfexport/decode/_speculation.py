"""Draft tokens by prompt lookup and verify several of them in one step.

A wrong draft costs time. Therefore a text drafts only while enough of its drafted tokens are accepted. Otherwise it
tries again after pauses that double.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

from tfexport.contract import ModelSpec
from tfexport.decode._search import Search
from tfexport.decode.request import Request

# Sizes of the n-grams that are looked up in source and text, and, if neither has them, in the source only.
SIZES = (3, 2)
IN_SOURCE, GOES_ON = 1, 0  # GOES_ON: a copy continues after a token that differs from it
# Tokens in a row that may differ from a copy before it ends.
MAX_CHANGED = 2
# Separates the source and the text; not a token.
_SEPARATOR = -1

# Draft lengths in tokens: few, because each needs its own binding.
DRAFT_LENGTHS = (1, 3, 7, 15)
# Minimum share of accepted tokens. One more token in a step costs a tenth of a step, a fifth with quantized weights.
MIN_ACCEPTANCE = 0.3
# Weight of the last draft in that share.
ACCEPTANCE_WEIGHT = 0.4
# Initial draft length and share, for matches of one token and for longer matches.
INITIAL_LENGTH_AND_SHARE = ((1, 0.4), (3, 0.5))
# Tokens without drafts after too few drafted tokens were accepted.
FIRST_PAUSE, LAST_PAUSE = 4, 64
# Each time that this many lookups fail, one more plain step is taken before the next lookup, up to a maximum.
LOOKUPS_PER_STEP, MAX_PLAIN_STEPS = 4, 8


class PromptLookup:
    """Draft copies from a source with the same vocabulary, or from the text itself.

    A copy continues at its place even after tokens that differ from it, such as a corrected word or another name.
    Otherwise the longest n-gram that occurred before is used: in the source the first after the newest copy, because
    texts copy their source from beginning to end; in the text the last.
    """

    def __init__(self, source_ids: Sequence[int]) -> None:
        self._tokens: list[int] = []
        self._followers: dict[tuple[int, ...], list[int]] = {}
        self._copied = 0  # place of the newest copy in the source
        self._next: int | None = None  # place of the next token in the copy
        self._changed = 0
        self._source_len = len(source_ids)
        self.extend(source_ids)
        self._tokens.append(_SEPARATOR)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text."""
        for token in tokens:
            place = len(self._tokens)
            for size in (*SIZES, IN_SOURCE):
                if place >= size:
                    self._followers.setdefault(tuple(self._tokens[place - size :]), []).append(place)
            self._tokens.append(token)
            if self._next is not None:
                self._changed = 0 if self._tokens[self._next] == token else self._changed + 1
                self._next += 1
                if self._changed > MAX_CHANGED or self._next == self._source_len:
                    self._next = None

    def places(self) -> Iterator[tuple[int, int]]:
        """Yield places that may continue the text, after their match size or `GOES_ON`."""
        for size in SIZES:
            if found := self._followers.get(tuple(self._tokens[-size:])):
                yield size, self._nearest(found)
        if self._next is not None:
            yield GOES_ON, self._next
        found = self._followers.get(tuple(self._tokens[-IN_SOURCE:]), [])
        if found and found[0] < self._source_len:
            yield IN_SOURCE, self._nearest(found)

    def copy(self, place: int, count: int) -> list[int]:
        """Return up to `count` tokens from a place on, at least one, and note the place."""
        self._next, self._changed = place, 0
        if place < self._source_len:
            self._copied = place
            return self._tokens[place : min(place + count, self._source_len)]
        drafted = self._tokens[place : place + count]
        period = len(self._tokens) - place
        while len(drafted) < count:  # a text may repeat itself
            drafted.append(drafted[-period])
        return drafted

    def _nearest(self, places: list[int]) -> int:
        if self._next is not None:
            at = bisect_left(places, self._next)
            if at < len(places) and places[at] == self._next:
                return self._next
        in_source = bisect_left(places, self._source_len)
        if not in_source:
            return places[-1]
        return places[min(bisect_left(places, self._copied, 0, in_source), in_source - 1)]


class _Acceptance:
    """Draft length and acceptance after matches of one size."""

    def __init__(self, size: int) -> None:
        self.resumes = 0  # text length from which on drafts are allowed
        self.length, self._share = INITIAL_LENGTH_AND_SHARE[size > 1]
        self._pause = FIRST_PAUSE

    def note(self, drafted: int, accepted: int, length: int) -> None:
        self._share += ACCEPTANCE_WEIGHT * (accepted / drafted - self._share)
        enough = drafted + 1 if accepted == drafted else accepted
        self.length = next((size for size in DRAFT_LENGTHS if size >= enough), DRAFT_LENGTHS[-1])
        if self._share < MIN_ACCEPTANCE:
            self.resumes, self._pause = length + self._pause, min(2 * self._pause, LAST_PAUSE)
        elif accepted:
            self._pause = FIRST_PAUSE


class Speculation:
    """The drafts of one text."""

    def __init__(self, request: Request, spec: ModelSpec) -> None:
        self.request = request
        self._most = request.config.prompt_lookup_num_tokens or 0
        # A source with another vocabulary cannot be copied.
        self._lookup = PromptLookup(request.source if spec.source_vocab == spec.vocab else ())
        self._acceptances = {size: _Acceptance(size) for size in (*SIZES, GOES_ON, IN_SOURCE)}
        self._newest = self._acceptances[GOES_ON]
        self._seen = self._failed_lookups = 0

    def draft(self, search: Search) -> list[int]:
        """Return tokens that may follow; empty if a plain step is as good."""
        length = int(search.history.lengths[0])
        self._lookup.extend(search.history.tokens[0, self._seen : length].tolist())
        self._seen = length
        left = self.request.max_new_tokens - self.request.num_forced - (length - len(self.request.prompt))
        for size, place in self._lookup.places() if left > 1 else ():
            acceptance = self._acceptances[size]
            if acceptance.resumes <= length:
                self._newest, self._failed_lookups = acceptance, 0
                return self._lookup.copy(place, min(acceptance.length, self._most, left - 1))
        self._failed_lookups += 1
        return []

    def plain_steps(self) -> int:
        """Return how many steps to take before the next lookup if there was no draft."""
        return min(1 + self._failed_lookups // LOOKUPS_PER_STEP, MAX_PLAIN_STEPS)

    def note(self, drafted: int, accepted: int, length: int) -> None:
        """Record the acceptance of a draft; the text now has `length` tokens."""
        self._newest.note(drafted, accepted, length)
