"""Build the results of `Model.generate`, with copies of unknown tokens."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tfexport import _html
from tfexport.decode.result import FinishReason, Hypothesis
from tfexport.decode.stops import stop_end
from tfexport.errors import ConfigError
from tfexport.generation import DecodeConfig
from tfexport.runtime.session import Floats, Session
from tfexport.text.tokenizer import Tokenizer

NO_COPIES_IN_STREAMS = (
    "replace_unknowns is true, but the alignment is only known when the text is complete; set it to false, or use "
    "generate"
)


@dataclass(frozen=True)
class Result:
    """A generated text.

    Attributes:
        text: the decoded text, without special tokens. If a stop string ended it, the text ends with that string.
        token_ids: the prefix and the generated tokens, including a final end-of-sequence token.
        score: log-probability of the generated tokens, divided by their number to the power of length_penalty; None if
            `return_scores` is false.
        finish_reason: "eos" for an end-of-sequence token, "stop" for a stop string, "length" for the length limit, or
            "time" for the time limit.
        index: place of the source text in the call.
    """

    text: str
    token_ids: tuple[int, ...] = field(repr=False)
    score: float | None
    finish_reason: FinishReason
    index: int

    def _repr_html_(self) -> str:
        return Results([self])._repr_html_()


@dataclass(frozen=True)
class Classification:
    """Label of a text, or of each of its tokens, with the logits."""

    label: str | tuple[str, ...]
    logits: Floats = field(repr=False)  # float32 [labels] or [tokens, labels]
    token_ids: tuple[int, ...] = field(repr=False)


class Results(list[Result]):
    """A list of results that notebooks display as a table."""

    def _repr_html_(self) -> str:
        scores = ["" if one.score is None else f"{one.score:.4f}" for one in self]
        rows = [(one.index, one.text, score, one.finish_reason) for one, score in zip(self, scores, strict=True)]
        return _html.table(("index", "text", "score", "finish_reason"), rows)


def result_of(tokenizer: Tokenizer, found: Hypothesis, config: DecodeConfig, index: int = 0) -> Result:
    """Decode a hypothesis; drop what its last token adds after a stop string."""
    end = stop_end(found.token_ids, config.strings, tokenizer.decode) if found.finish_reason == "stop" else None
    text = tokenizer.decode(found.token_ids)[:end]
    return Result(text, found.token_ids, found.score, found.finish_reason, index)


def check_copies(session: Session, tokenizer: Tokenizer | None) -> None:
    """Check that unknown tokens can be replaced, before anything is decoded."""
    from tfexport.decode.align import need_alignment

    if tokenizer is None or not session.spec.has_decoder:
        return  # other checks report this
    if not session.spec.source_vocab:
        raise ConfigError("replace_unknowns: the source has no tokens to copy; leave it out")
    if tokenizer.unknown is None:
        raise ConfigError("replace_unknowns: the vocabulary has no unknown token to replace; leave it out")
    need_alignment(session, "replace_unknowns")


def with_copies(
    session: Session,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    sources: Sequence[Sequence[int]],
    results: Sequence[Result],
    decoding: DecodeConfig,
    *,
    batch_size: int = 32,
    cancel: threading.Event | None = None,
) -> list[Result]:
    """Replace unknown tokens of results by their source tokens, on any thread."""
    from tfexport.decode.align import unknown_sources

    assert tokenizer.unknown is not None
    copies = [tokenizer.copies(text) for text in texts]
    found = unknown_sources(
        session,
        [(sources[one.index], one.token_ids) for one in results],
        [[piece is not None for piece in copies[one.index]] for one in results],
        tokenizer.unknown,
        start=decoding.decoder_start_token_id,
        batch_size=batch_size,
        cancel=cancel,
    )
    return [
        _copied(tokenizer, one, {place: copies[one.index][source] or "" for place, source in places.items()})
        for one, places in zip(results, found, strict=True)
    ]


def _copied(tokenizer: Tokenizer, result: Result, tokens: Mapping[int, str]) -> Result:
    if not tokens:
        return result
    num_cut = len(tokenizer.decode(result.token_ids)) - len(result.text)  # after a stop string
    text = tokenizer.decode_with(result.token_ids, tokens)
    return dataclasses.replace(result, text=text[: len(text) - num_cut])
