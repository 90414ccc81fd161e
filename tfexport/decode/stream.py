"""Decode one text and hand out its tokens as they come."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tfexport.decode.config import DecodeConfig
from tfexport.decode.greedy import choose_tokens
from tfexport.decode.request import Batch, check_requests
from tfexport.errors import InputError, raise_all
from tfexport.runtime.session import S, Session


def stream(
    session: Session[S], source: Sequence[int], config: DecodeConfig, *, prefix: Sequence[int] = ()
) -> Iterator[int]:
    """Generate for one source, token by token.

    The arguments are checked at once, the model runs as the iterator is read.

    Args:
        session: any backend.
        source: token ids of the text.
        config: greedy or one sample.
        prefix: token ids to begin with, without the start token.

    Returns:
        The `token_ids` of the hypothesis that `decode` finds: the prefix, then
        each new token, a final end-of-sequence token included.

    Raises:
        InputError: beams or several sequences are asked for, or something that
            the model cannot take.
    """
    problems = [
        f"{name} is {getattr(config, name)}, but tokens can only be handed out as they come for one; set it to 1"
        for name in ("num_beams", "num_return_sequences")
        if getattr(config, name) > 1
    ]
    raise_all(InputError, "stream", problems)
    has_engines = session.max_rows is not None
    requests = check_requests(session.spec, [source], config, [prefix], has_engines=has_engines)
    batch = Batch.of(requests, config, session.spec)
    return _tokens(session, batch, config)


def _tokens(session: Session[S], batch: Batch, config: DecodeConfig) -> Iterator[int]:
    yield from batch.prompts[0, 1:].tolist()
    for chosen in choose_tokens(session, batch, config):
        yield int(chosen.token_ids[0])
