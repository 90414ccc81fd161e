"""What decoding gives back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tfexport.decode.ends import Ends

FinishReason = Literal["eos", "stop", "length", "time"]


@dataclass(frozen=True)
class Hypothesis:
    """One way to continue a source.

    Log-probabilities are those after the filters, as in Hugging Face `generate`:
    a penalised token counts with its penalty, a forced first token counts 0, and
    the rest of the vocabulary is not renormalised. A sampled token counts with
    the probability that it was drawn with.

    Attributes:
        token_ids: the prefix and what was generated, without the start token;
            an end-of-sequence token is the last one where it was reached.
        score: log_prob / num_new_tokens ** length_penalty, where the exponent is
            1 unless beams were searched and the prefix counts nothing.
        log_prob: Σ log p of the generated tokens.
        finish_reason: "eos", or what came first: "stop" for a stop string, "length" for the limit, "time" for the
            end of the time.
    """

    token_ids: tuple[int, ...]
    score: float
    log_prob: float
    finish_reason: FinishReason


def finish_reason(token_id: int, ends: Ends, *, is_stopped: bool, is_full: bool) -> FinishReason:
    """Say why a hypothesis ended: by its last token, at a stop string, at its limit, or for want of time."""
    if token_id in ends.ids:
        return "eos"
    return "stop" if is_stopped else "length" if is_full else "time"
