"""Decode the texts of one call, stream one text, and warm a session up."""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import numpy as np

from tfexport._arguments import check_call, listed_ids
from tfexport.decode.alternatives import alternatives
from tfexport.decode.loop import Loop, run_loop
from tfexport.decode.request import Request, TextOf, check_requests
from tfexport.decode.result import Hypothesis
from tfexport.errors import InputError, TfexportError, raise_all
from tfexport.generation import DecodeConfig
from tfexport.runtime.session import Session

# A greedy step on a GPU is run once, captured for each of two buffers, and replayed.
WARM_UP_STEPS = 4


def decode(
    session: Session,
    sources: Iterable[Iterable[int]],
    config: DecodeConfig,
    *,
    prefixes: Iterable[Iterable[int]] | None = None,
    batch_size: int = 32,
    on_progress: Callable[[int], None] | None = None,
    text_of: TextOf | None = None,
    num_fixed: int = 0,
    cancel: threading.Event | None = None,
    places: Sequence[int] | None = None,
) -> list[list[Hypothesis]]:
    """Decode every source; results depend neither on the others nor on `batch_size`.

    The arguments are those of `Model.generate_ids`, and:

    - `text_of`: decodes token ids, for stop strings.
    - `num_fixed`: tokens of each prefix that its hypotheses begin with, even if they are only biased towards the rest.
    - `places`: places of the sources for the seeds of samples; None for 0, 1, ….

    Returns:
        For each source its hypotheses: one, the num_return_sequences best beams, or as many samples or alternatives.
    """
    check_call("decode", batch_size=batch_size, on_progress=on_progress, cancel=cancel)
    sources = listed_ids("decode", "sources", sources)
    requests = check_requests(session, sources, config, prefixes, text_of, num_fixed)
    if places is not None:
        requests = [dataclasses.replace(one, place=place) for one, place in zip(requests, places, strict=True)]
    samples = config.num_return_sequences if config.do_sample or config.return_alternatives else 1
    loop = Loop(session, batch_size * samples)
    if config.return_alternatives:
        requests = alternatives(session, requests, batch_size, cancel)
    elif samples > 1:
        requests = [dataclasses.replace(request, sample=sample) for request in requests for sample in range(samples)]
    wanted = Counter(request.text for request in requests)
    # Longest first: texts of about equal length are decoded together, and the shortest ones last.
    requests.sort(key=lambda request: -len(request.source_ids))
    loop.submit(requests)
    results: list[dict[int, list[Hypothesis]]] = [{} for _ in sources]
    for updates in run_loop(loop, cancel):
        finished = 0
        for update in updates:
            if isinstance(update.outcome, TfexportError):
                raise update.outcome
            assert update.outcome is not None
            found = results[update.request.text]
            found[update.request.sample] = update.outcome
            finished += len(found) == wanted[update.request.text]
        if finished and on_progress:
            on_progress(finished)
    return [[best for sample in sorted(found) for best in found[sample]] for found in results]


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
    """Return an iterator over the tokens of one source, without beams.

    The arguments are those of `decode`, and `defaults`, the options that come from the model, for errors. They are
    checked before the first token is requested. The tokens equal the `token_ids` of the hypothesis of `decode`.
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
    return _tokens(session, dataclasses.replace(request, stream=True), cancel)


def _tokens(session: Session, request: Request, cancel: threading.Event | None) -> Iterator[int]:
    yield from request.prompt[1:]
    loop = Loop(session, 1)
    loop.submit([request])
    for updates in run_loop(loop, cancel):
        for update in updates:
            if isinstance(update.outcome, TfexportError):
                raise update.outcome
            if update.token_id is not None:
                yield update.token_id


def warm_up(session: Session, rows: int, source_len: int) -> None:
    """Run a batch and a few greedy steps, to prepare the session for later calls."""
    spec, most = session.spec, session.limits.rows.most
    if source_len > spec.max_source_length:
        raise InputError(f"warm-up: {source_len} source tokens, the limit is {spec.max_source_length}; ask for less")
    token = spec.tokens.eos if spec.tokens.eos < spec.source_vocab else 0
    shape = (rows if most is None else min(rows, most), source_len)
    source_ids, source_mask = np.full(shape, token), np.ones(shape, np.bool_)
    if not spec.has_decoder:
        session.hidden_states(source_ids, source_mask)
        return
    batch, newest = session.batch(), np.full(shape[0], spec.tokens.start)
    batch.add(source_ids, source_mask, [[spec.tokens.start]] * shape[0])
    for _ in range(min(WARM_UP_STEPS, spec.max_target_length)):
        newest = batch.step(newest, 1).token_ids[:, 0]
