"""Decode one text and hand out its tokens as they come."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Collection, Iterable, Iterator

from tfexport._arguments import check_call
from tfexport.decode.cancel import updates
from tfexport.decode.loop import Loop
from tfexport.decode.request import Request, check_requests
from tfexport.decode.stops import TextOf
from tfexport.errors import InputError, TfexportError, raise_all
from tfexport.generation import DecodeConfig
from tfexport.runtime.session import Session


def stream(
    session: Session,
    source: Iterable[int],
    config: DecodeConfig,
    *,
    prefix: Iterable[int] = (),
    text_of: TextOf | None = None,
    num_fixed: int = 0,
    defaults: Collection[str] = (),
    cancel: threading.Event | None = None,
) -> Iterator[int]:
    """Generate for one source, token by token.

    The arguments are checked at once, the model runs as the iterator is read.

    Args:
        session: any backend.
        source: token ids of the text.
        config: greedy or one sample.
        prefix: token ids to begin with, or to be biased towards, without the start token.
        text_of: decodes token ids; stop strings need it.
        num_fixed: tokens to begin with even where the text is biased towards the rest of the prefix.
        defaults: names of options that the caller has not given but the model brings, for errors.
        cancel: set by another thread to give the text up; the iterator then raises `Cancelled` where the next token
            would come. None for a text that nobody cancels.

    Returns:
        The `token_ids` of the hypothesis that `decode` finds: the prefix, then
        each new token, a final end-of-sequence token included.

    Raises:
        InputError: beams or several sequences are asked for, or something that
            the model cannot take.
    """
    check_call("stream", cancel=cancel)
    whose = dict.fromkeys(defaults, " by the model's own default")
    problems = [
        f"{name} is {getattr(config, name)}{whose.get(name, '')}, but tokens can only be handed out as they "
        "come for one; set it to 1"
        for name in ("num_beams", "num_return_sequences")
        if getattr(config, name) > 1
    ]
    raise_all(InputError, "stream", problems)
    (request,) = check_requests(session, [source], config, [prefix], text_of, num_fixed)
    return _tokens(session, request, cancel)


def _tokens(session: Session, request: Request, cancel: threading.Event | None) -> Iterator[int]:
    yield from request.prompt[1:]
    loop = Loop(session, 1)
    loop.submit([dataclasses.replace(request, stream=True)])
    for some in updates(loop, cancel):
        for update in some:
            if isinstance(update.outcome, TfexportError):
                raise update.outcome
            if update.token_id is not None:
                yield update.token_id
