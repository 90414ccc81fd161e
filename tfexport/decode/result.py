"""Represent the results of decoding: hypotheses and why they ended."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tfexport.runtime.session import Ids, Mask

FinishReason = Literal["eos", "stop", "length", "time"]


@dataclass(frozen=True)
class Hypothesis:
    """One generated continuation of a source.

    Log-probabilities are those after all processors, as in Hugging Face `generate`: a penalized token counts with its
    penalty, a forced first token counts 0, and the rest of the vocabulary is not renormalized. A sampled token counts
    with the probability that it was drawn with.

    Attributes:
        token_ids: the prefix and the generated tokens, without the start token. An end-of-sequence token is the last.
        score: log_prob / num_new_tokens ** length_penalty. The exponent is 1 without beams. The prefix does not count.
        log_prob: Σ log p of the generated tokens. It and the score are None if `return_scores` is false.
        finish_reason: "eos" for an end-of-sequence token, "stop" for a stop string, "length" for the length limit, or
            "time" for the time limit.
    """

    token_ids: tuple[int, ...]
    score: float | None
    log_prob: float | None
    finish_reason: FinishReason


class Ends:
    """The tokens that end a text, at least one; `ids` are in ascending order."""

    def __init__(self, ids: Iterable[int]) -> None:
        self.ids = tuple(sorted(set(ids)))
        self._ids: Ids = np.array(self.ids if len(self.ids) > 1 else self.ids[0])

    def among(self, token_ids: Ids) -> Mask:
        """Return which of `token_ids`, of any shape, end a text."""
        found: Mask = np.isin(token_ids, self._ids) if self._ids.ndim else token_ids == self._ids
        return found


def finish_reason(token_id: int, ends: Collection[int], *, is_stopped: bool, is_full: bool) -> FinishReason:
    """Return why a hypothesis ended."""
    if token_id in ends:
        return "eos"
    return "stop" if is_stopped else "length" if is_full else "time"
