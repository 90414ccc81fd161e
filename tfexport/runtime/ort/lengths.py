"""Which sources are encoded together, so that little of the work is padding and no run takes much memory."""

from __future__ import annotations

import numpy as np

from tfexport.runtime.session import Ids

# What a run of the encoder costs beside its tokens, in tokens: with small models and large ones between 20 and 70.
RUN_TOKENS = 64
# Scores of a head that a run may have, from every token to every token of a source: the operators keep those of all
# rows at once, 4 bytes each. Many long sources in one run gain nothing, for one alone keeps the processor busy.
MAX_SCORES = 2**21


def runs(lengths: Ids) -> list[Ids]:
    """Divide a batch into runs of the encoder that cost least together.

    A run computes as many tokens as it has rows times its longest source. In order of length the cheapest division
    of the first n rows ends with a run that begins somewhere, behind the cheapest division of what lies before.
    Runs that would have too many scores are cut; a source of more than 1,448 tokens is always a run of its own.

    Args:
        lengths: tokens of each source, int64 [batch], at least one.

    Returns:
        Rows of each run, int64, longest source first; every row once.
    """
    order = (-lengths).argsort(kind="stable")
    longest, batch = lengths[order], lengths.size
    if longest[0] == longest[-1]:
        return _cut(order, int(longest[0]))
    costs, begins = np.zeros(batch + 1), [0]
    for end in range(1, batch + 1):
        ending_here = costs[:end] + longest[:end] * np.arange(end, 0, -1) + RUN_TOKENS
        begins.append(int(ending_here.argmin()))
        costs[end] = ending_here[begins[-1]]
    found, end = [], batch
    while end:
        found += _cut(order[begins[end] : end], int(longest[begins[end]]))[::-1]
        end = begins[end]
    return found[::-1]


def has_many_scores(batch: int, longest: int) -> bool:
    """Say whether a run has more scores than several sources together ever have."""
    return batch * longest**2 > MAX_SCORES


def _cut(rows: Ids, longest: int) -> list[Ids]:
    """Divide the rows of a run, so that none has too many scores."""
    most = max(MAX_SCORES // longest**2, 1)
    return [rows[first : first + most] for first in range(0, rows.size, most)]


def rows_of(sources: Ids, width: int) -> Ids:
    """Return the rows of sources, `width` each, in their order."""
    rows: Ids = (sources[:, None] * width + np.arange(width)).ravel()
    return rows
