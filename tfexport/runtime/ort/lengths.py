"""Which sources are encoded together, so that little of the work is padding."""

from __future__ import annotations

import numpy as np

from tfexport.runtime.session import Ids

# What a run of the encoder costs beside its tokens, in tokens: with small models and large ones between 20 and 70.
RUN_TOKENS = 64


def runs(lengths: Ids) -> list[Ids]:
    """Divide a batch into runs of the encoder that cost least together.

    A run computes as many tokens as it has rows times its longest source. In order of length the cheapest division
    of the first n rows ends with a run that begins somewhere, behind the cheapest division of what lies before.

    Args:
        lengths: tokens of each source, int64 [batch], at least one.

    Returns:
        Rows of each run, int64, longest source first; every row once.
    """
    order = (-lengths).argsort(kind="stable")
    longest, batch = lengths[order], lengths.size
    if longest[0] == longest[-1]:
        return [order]
    costs, begins = np.zeros(batch + 1), [0]
    for end in range(1, batch + 1):
        ending_here = costs[:end] + longest[:end] * np.arange(end, 0, -1) + RUN_TOKENS
        begins.append(int(ending_here.argmin()))
        costs[end] = ending_here[begins[-1]]
    found, end = [], batch
    while end:
        found.append(order[begins[end] : end])
        end = begins[end]
    return found[::-1]


def rows_of(sources: Ids, width: int) -> Ids:
    """Return the rows of sources, `width` each, in their order."""
    rows: Ids = (sources[:, None] * width + np.arange(width)).ravel()
    return rows
