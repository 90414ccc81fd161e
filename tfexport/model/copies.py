"""Replace unknown tokens of results by the source tokens that they align with."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping, Sequence

from tfexport.errors import ConfigError
from tfexport.generation import DecodeConfig
from tfexport.model.result import Result
from tfexport.runtime.session import Session
from tfexport.text.tokenizer import Tokenizer

NO_COPIES_IN_STREAMS = (
    "replace_unknowns is true, but the alignment is known when the text is whole; set it to false, or use generate"
)


def check_copies(session: Session, tokenizer: Tokenizer | None) -> None:
    """Check that unknown tokens can be replaced, before anything is decoded.

    Raises:
        ConfigError: the vocabulary has no unknown token, or the bundle or backend has no alignment.
    """
    from tfexport.decode.align import need_alignment

    if tokenizer is None or not session.spec.has_decoder:
        return  # other checks report this
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
    """Replace the unknown tokens of each result by their source tokens.

    It may be called on any thread, for sessions that pass `check_copies`. `results` may be in any order; their `index`
    is the place of the source in `texts` and `sources`.
    """
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
    # A stop string has cut this much from the text.
    cut = len(tokenizer.decode(result.token_ids)) - len(result.text)
    text = tokenizer.decode_with(result.token_ids, tokens)
    return dataclasses.replace(result, text=text[: len(text) - cut])
