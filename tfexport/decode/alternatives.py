"""Expand a request into its best next tokens, each continued on its own."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from itertools import groupby

import numpy as np

from tfexport.decode._history import History
from tfexport.decode._processors import Processors
from tfexport.decode._search import is_broken, not_a_number, nothing_left
from tfexport.decode.loop import check_cancelled
from tfexport.decode.request import Request
from tfexport.decode.stops import Stops
from tfexport.runtime.session import Floats, Ids, Session, pad_right


def alternatives(
    session: Session, requests: Sequence[Request], batch_size: int, cancel: threading.Event | None = None
) -> list[Request]:
    """Replace each request by one for each of its best next tokens.

    There are at most num_return_sequences per request. The requests have the same options. Each new prompt ends with
    the token, which counts as generated with its log-probability; `sample` is its rank.
    """
    most = session.limits.rows.most
    size = batch_size if most is None else min(batch_size, most)
    # A text that its forced token completes has no next token. Some sessions take only equally long prompts.
    expanded = [request for request in requests if request.is_answered]
    waiting = [request for request in requests if not request.is_answered]
    waiting.sort(key=lambda request: (len(request.prompt), len(request.source_ids)))
    for _, group in groupby(waiting, lambda request: len(request.prompt)):
        alike = list(group)
        for first in range(0, len(alike), size):
            check_cancelled(cancel)
            some = alike[first : first + size]
            for request, token_ids, log_probs in zip(some, *_next_tokens(session, some), strict=True):
                expanded += _expand(session, request, token_ids, log_probs)
    return expanded


def _next_tokens(session: Session, requests: Sequence[Request]) -> tuple[Ids, Floats]:
    spec, config = session.spec, requests[0].config
    processors, history, batch = Processors(config, spec), History(spec.vocab), session.batch()
    history.add(request.prompt for request in requests)
    processors.add(requests)
    source_ids, source_mask = pad_right([request.source_ids for request in requests], spec.tokens.pad)
    batch.add(source_ids, source_mask, [request.prompt for request in requests])
    found = batch.step(history.newest, processors.num_candidates(config.num_return_sequences, history))
    broken = is_broken(found)
    if broken is not None:
        request = requests[int(broken.argmax())]
        raise not_a_number(request, request.num_forced)
    num_new, limits = ([getattr(one, name) for one in requests] for name in ("num_forced", "max_new_tokens"))
    return processors.apply(found, history, np.array(num_new), np.array(limits))


def _expand(session: Session, request: Request, token_ids: Ids, log_probs: Floats) -> list[Request]:
    config, num_new = request.config, request.num_forced + 1
    ends, stops = config.ends(session.spec.tokens.eos), Stops(config)
    allowed = [pair for pair in zip(token_ids.tolist(), log_probs.tolist(), strict=True) if pair[1] > -np.inf]
    if not allowed:
        raise nothing_left(request, request.num_forced)
    alone = dataclasses.replace(config, return_alternatives=False, num_return_sequences=1)
    expanded = []
    for rank, (token, log_prob) in enumerate(allowed[: config.num_return_sequences]):
        prompt = (*request.prompt, token)
        is_last = token in ends or num_new == request.max_new_tokens or stops.is_stopped(request, prompt[1:])
        changes = {"prompt": prompt, "config": alone, "num_forced": num_new, "log_prob": log_prob}
        expanded.append(dataclasses.replace(request, **changes, is_answered=is_last, sample=rank))
    return expanded
