"""What decoding gives back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tfexport.decode.ends import Ends

FinishReason = Literal["eos", "length"]


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
        finish_reason: "eos", or "length" when the limit came first.
    """

    token_ids: tuple[int, ...]
    score: float
    log_prob: float
    finish_reason: FinishReason


def finish_reason(token_id: int, ends: Ends) -> FinishReason:
    """Say why a hypothesis ended whose last token is `token_id`."""
    return "eos" if token_id in ends.ids else "length"
