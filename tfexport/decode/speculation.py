"""Speculative decoding by prompt look-up: what may follow is looked up, and one step verifies several tokens.

A draft costs time where it is wrong. So a text drafts as long as enough of what it drafts is said, and tries again
later, after pauses that double.
"""

from __future__ import annotations

from tfexport.contract import ModelSpec
from tfexport.decode.lookup import GOES_ON, IN_SOURCE, SIZES, PromptLookup
from tfexport.decode.request import Request
from tfexport.decode.search import Search

# Tokens of a draft: few sizes, for each is bound by itself.
DRAFTS = (1, 3, 7, 15)
# Share of drafted tokens that have to be said. One more in a step costs a tenth of a step, narrow weights a fifth.
LEAST_SAID = 0.3
# How much the last draft counts in that share.
WEIGHT = 0.4
# What a text begins with: length and share behind a match of one token, and behind longer ones.
FIRST = ((1, 0.4), (3, 0.5))
# Tokens until what has not gained is tried again.
FIRST_PAUSE, LAST_PAUSE = 4, 64
# Looks in vain after which one more token is said before the next, and how many there are at most.
LOOKS, MOST_STEPS = 4, 8


class _Trust:
    """How far drafts behind matches of one size are worth their time.

    Attributes:
        resumes: length of the text from which on there may be one.
        length: tokens of the next one.
    """

    def __init__(self, size: int) -> None:
        self.resumes = 0
        self.length, self._said = FIRST[size > 1]
        self._pause = FIRST_PAUSE

    def note(self, drafted: int, said: int, length: int) -> None:
        """Learn that of a draft so much was said; the text has `length` tokens now."""
        self._said += WEIGHT * (said / drafted - self._said)
        enough = drafted + 1 if said == drafted else said
        self.length = next((size for size in DRAFTS if size >= enough), DRAFTS[-1])
        if self._said < LEAST_SAID:
            self.resumes, self._pause = length + self._pause, min(2 * self._pause, LAST_PAUSE)
        elif said:
            self._pause = FIRST_PAUSE


class Speculation:
    """What one text drafts.

    Attributes:
        request: the text.
    """

    def __init__(self, request: Request, spec: ModelSpec) -> None:
        """Begin with the text as its request has it; the ids of another vocabulary say nothing of it."""
        self.request = request
        self._most = request.config.prompt_lookup_num_tokens or 0
        self._lookup = PromptLookup(request.source_ids if spec.source_vocab == spec.vocab else ())
        self._trusts = {size: _Trust(size) for size in (*SIZES, GOES_ON, IN_SOURCE)}
        self._tried = self._trusts[GOES_ON]
        self._seen = self._vain = 0

    def draft(self, search: Search) -> list[int]:
        """Return tokens that may follow what the search has said; none where a plain step is as good."""
        length = int(search.history.lengths[0])
        self._lookup.extend(search.history.tokens[0, self._seen : length].tolist())
        self._seen = length
        left = self.request.max_new_tokens - self.request.num_forced - (length - len(self.request.prompt))
        for size, place in self._lookup.places() if left > 1 else ():
            trust = self._trusts[size]
            if trust.resumes <= length:
                self._tried, self._vain = trust, 0
                return self._lookup.copy(place, min(trust.length, self._most, left - 1))
        self._vain += 1
        return []

    def plain_steps(self) -> int:
        """Say how many steps to take before the next look, where there was no draft."""
        return min(1 + self._vain // LOOKS, MOST_STEPS)

    def note(self, drafted: int, said: int, length: int) -> None:
        """Learn from the newest draft.

        Args:
            drafted: its tokens.
            said: how many of them the text has said.
            length: of the text now.
        """
        self._tried.note(drafted, said, length)
