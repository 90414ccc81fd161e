"""Alternatives: the best next tokens of a text, each of which is then continued on its own."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from itertools import groupby

import numpy as np

from tfexport.decode.cancel import check_cancelled
from tfexport.decode.filters import Filters
from tfexport.decode.history import History
from tfexport.decode.request import Request
from tfexport.decode.search import is_broken, is_stopped, not_a_number, nothing_left
from tfexport.decode.stops import Stops
from tfexport.runtime.session import Floats, Ids, Session, pad_right


def alternatives(
    session: Session, requests: Sequence[Request], batch_size: int, cancel: threading.Event | None = None
) -> list[Request]:
    """Replace each request by one for each of its num_return_sequences best next tokens.

    Args:
        session: any backend.
        requests: all with the same settings.
        batch_size: texts whose next tokens are asked for at once; fewer where the session takes fewer rows.
        cancel: looked at before each batch; None for a call that nobody cancels.

    Returns:
        Requests whose prompts end with the token, which counts as generated with its log-probability; `sample` is its
        rank. Fewer for a text whose filters leave fewer tokens.

    Raises:
        InputError: a text has no token to choose from.
        BackendError: the backend failed, the model gave numbers that are none, or a text cannot be put into words.
        Cancelled: the event is set.
    """
    most = session.limits.rows.most
    size = batch_size if most is None else min(batch_size, most)
    # What a forced token answers has no next one. Some sessions take equally long prompts alone.
    answered = [request for request in requests if request.is_answered]
    waiting = [request for request in requests if not request.is_answered]
    waiting.sort(key=lambda request: (len(request.prompt), len(request.source_ids)))
    expanded = list(answered)
    for _, group in groupby(waiting, lambda request: len(request.prompt)):
        alike = list(group)
        for first in range(0, len(alike), size):
            check_cancelled(cancel)
            some = alike[first : first + size]
            for request, token_ids, log_probs in zip(some, *_next_tokens(session, some), strict=True):
                expanded += _expand(session, request, token_ids, log_probs)
    return expanded


def _next_tokens(session: Session, requests: Sequence[Request]) -> tuple[Ids, Floats]:
    """Return the best next tokens and their log-probabilities, [requests, candidates]; -inf is a ban."""
    spec, config = session.spec, requests[0].config
    filters, history, batch = Filters(config, spec), History(spec.vocab), session.batch()
    history.add(request.prompt for request in requests)
    filters.add(request.source_ids for request in requests)
    batch.add(
        *pad_right([request.source_ids for request in requests], spec.tokens.pad),
        [request.prompt for request in requests],
    )
    found = batch.step(history.newest, filters.num_candidates(config.num_return_sequences, history))
    broken = is_broken(found)
    if broken is not None:
        request = requests[int(broken.argmax())]
        raise not_a_number(request, request.num_forced)
    # Filters see what they see in the search that goes on: logits, but log-probabilities where there are beams.
    normalizer, num_new = found.log_normalizer[:, None], np.array([request.num_forced for request in requests])
    shift = normalizer if config.num_beams > 1 else np.zeros_like(normalizer)
    token_ids, scores = filters.apply(history, num_new, found.token_ids, found.logits - shift)
    log_probs = scores - (normalizer - shift)
    if filters.forced:
        num_left = np.array([request.max_new_tokens for request in requests]) - num_new
        token_ids, log_probs = filters.force(num_left, token_ids, log_probs)
    return token_ids, log_probs


def _expand(session: Session, request: Request, token_ids: Ids, log_probs: Floats) -> list[Request]:
    config, num_new = request.config, request.num_forced + 1
    ends, stops = config.ends(session.spec.tokens.eos), Stops(config)
    allowed = [pair for pair in zip(token_ids.tolist(), log_probs.tolist(), strict=True) if pair[1] > -np.inf]
    if not allowed:
        raise nothing_left(request, request.num_forced)
    expanded = []
    for rank, (token, log_prob) in enumerate(allowed[: config.num_return_sequences]):
        prompt = (*request.prompt, token)
        is_last = token in ends or num_new == request.max_new_tokens or is_stopped(stops, request, prompt[1:])
        expanded.append(
            dataclasses.replace(
                request,
                prompt=prompt,
                config=dataclasses.replace(config, return_alternatives=False, num_return_sequences=1),
                num_forced=num_new,
                log_prob=log_prob,
                is_answered=is_last,
                sample=rank,
            )
        )
    return expanded
