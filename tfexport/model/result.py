"""What a call gives for each text."""

from __future__ import annotations

from dataclasses import dataclass

from tfexport.decode.result import FinishReason, Hypothesis
from tfexport.decode.stops import stop_end
from tfexport.generation import DecodeConfig
from tfexport.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Result:
    """One text that was generated.

    Attributes:
        text: decoded, without special tokens.
        token_ids: the prefix and what was generated, a final end-of-sequence token included.
        score: log-probability of the generated tokens over their number to the power of length_penalty.
        finish_reason: "eos", or what came first: "stop" for a stop string, with which the text ends, "length" for the
            limit, "time" for the end of the time.
        index: of the text in the call that this continues.
    """

    text: str
    token_ids: tuple[int, ...]
    score: float
    finish_reason: FinishReason
    index: int


def result_of(tokenizer: Tokenizer, found: Hypothesis, config: DecodeConfig, index: int = 0) -> Result:
    """Put a hypothesis of the text `index` into words, without what its last token says behind a stop string."""
    end = stop_end(found.token_ids, config.strings, tokenizer.decode) if found.finish_reason == "stop" else None
    text = tokenizer.decode(found.token_ids)[:end]
    return Result(text, found.token_ids, found.score, found.finish_reason, index)
