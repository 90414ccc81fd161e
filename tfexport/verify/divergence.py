"""Where the decodes of a stage part from the reference's, and how sure the reference was of its own there."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import numpy as np

from tfexport.decode.result import Hypothesis
from tfexport.runtime.session import Session, pad_right
from tfexport.verify.report import Divergence

_BATCH = 8


def parting(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the position of the first token that differs; one text may be the beginning of the other."""
    return next(i for i, (a, b) in enumerate(zip_longest(left, right)) if a != b)


def measure_divergence(
    reference: Session,
    sources: Sequence[Sequence[int]],
    expected: Sequence[Hypothesis],
    got: Sequence[Hypothesis],
) -> Divergence:
    """Find the medians over the sequences that part.

    Args:
        reference: that gave `expected`; asked for its two best logits where they part.
        sources: that were decoded.
        expected: by the reference.
        got: by the stage.
    """
    parted = [
        (source, left.token_ids, parting(left.token_ids, right.token_ids))
        for source, left, right in zip(sources, expected, got, strict=True)
        if left.token_ids != right.token_ids
    ]
    equal = 1 - len(parted) / len(sources)
    if not parted:
        return Divergence(equal, None, None)
    margins = [
        margin
        for first in range(0, len(parted), _BATCH)
        for margin in _margins(reference, parted[first : first + _BATCH])
    ]
    return Divergence(equal, float(np.median([position for *_, position in parted])), float(np.median(margins)))


def _margins(reference: Session, parted: Sequence[tuple[Sequence[int], Sequence[int], int]]) -> Sequence[float]:
    """Follow each text to where it is left, and return the distance of the two best logits there."""
    tokens = reference.spec.tokens
    batch = reference.batch()
    batch.add(*pad_right([source for source, *_ in parted], tokens.pad), [[tokens.start]] * len(parted))
    margins = np.zeros(len(parted))
    fed = np.full(len(parted), tokens.start)
    for step in range(max(position for *_, position in parted) + 1):
        logits = batch.step(fed, 2).logits
        here = np.array([position == step for *_, position in parted])
        margins[here] = logits[here, 0] - logits[here, 1]
        fed = np.array([text[step] if step < len(text) else tokens.pad for _, text, _ in parted])
    found: list[float] = margins.tolist()
    return found
