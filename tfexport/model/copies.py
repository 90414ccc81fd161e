"""Unknown tokens of a result, written as what they were read from."""

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
    """Refuse a model that cannot say what an unknown token was read from, before it decodes.

    Raises:
        ConfigError: its vocabulary has no unknown token, or its bundle or backend no alignment.
    """
    from tfexport.decode.align import need_alignment

    if tokenizer is None or not session.spec.has_decoder:
        return  # which is refused for other reasons
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
    """Write in each result what its unknown tokens were read from; it may be called on any thread.

    Args:
        session: that `check_copies` does not refuse.
        tokenizer: of its bundle.
        texts: of the sources.
        sources: token ids of each text.
        results: of any of them, by their `index`.
        decoding: that they come from.
        batch_size: results read at once.
        cancel: set by another thread to give the call up; None for a call that nobody cancels.

    Raises:
        BackendError: the backend failed.
        Cancelled: the event was set.
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
    """Put tokens of the source into a text, which still ends where a stop string ended it."""
    if not tokens:
        return result
    cut = len(tokenizer.decode(result.token_ids)) - len(result.text)
    text = tokenizer.decode_with(result.token_ids, tokens)
    return dataclasses.replace(result, text=text[: len(text) - cut])
