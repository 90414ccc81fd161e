"""Build the results of `Model.generate` from hypotheses."""

from __future__ import annotations

from dataclasses import dataclass, field

from tfexport import _html
from tfexport.decode.result import FinishReason, Hypothesis
from tfexport.decode.stops import stop_end
from tfexport.generation import DecodeConfig
from tfexport.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Result:
    """A generated text.

    Attributes:
        text: the decoded text, without special tokens. If a stop string ended it, the text ends with that string.
        token_ids: the prefix and the generated tokens, including a final end-of-sequence token.
        score: log-probability of the generated tokens, divided by their number to the power of length_penalty.
        finish_reason: "eos" for an end-of-sequence token, "stop" for a stop string, "length" for the length limit, or
            "time" for the time limit.
        index: place of the source text in the call.
    """

    text: str
    token_ids: tuple[int, ...] = field(repr=False)
    score: float
    finish_reason: FinishReason
    index: int

    def _repr_html_(self) -> str:
        return Results([self])._repr_html_()


class Results(list[Result]):
    """A list of results that notebooks display as a table."""

    def _repr_html_(self) -> str:
        rows = [(one.index, one.text, f"{one.score:.4f}", one.finish_reason) for one in self]
        return _html.table(("index", "text", "score", "finish_reason"), rows)


def result_of(tokenizer: Tokenizer, found: Hypothesis, config: DecodeConfig, index: int = 0) -> Result:
    """Decode a hypothesis; drop what its last token adds after a stop string."""
    end = stop_end(found.token_ids, config.strings, tokenizer.decode) if found.finish_reason == "stop" else None
    text = tokenizer.decode(found.token_ids)[:end]
    return Result(text, found.token_ids, found.score, found.finish_reason, index)
