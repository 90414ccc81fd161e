"""Decode the texts of one call, stream one text, and warm up a session."""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import groupby, islice

import numpy as np

from tfexport._arguments import check_call
from tfexport.decode._history import History
from tfexport.decode._processors import Processors
from tfexport.decode._search import is_broken, nan_error, no_token_error
from tfexport.decode.loop import Loop, check_cancelled, run_loop
from tfexport.decode.request import Request, TextOf, check_requests
from tfexport.decode.result import Hypothesis
from tfexport.decode.stops import is_stopped
from tfexport.errors import InputError, TfexportError, raise_all
from tfexport.generation import DecodeConfig
from tfexport.runtime.session import Floats, Ids, Session
from tfexport.runtime.sources import Source, pad_sources, random_source

# A greedy step on a GPU is run once, captured for each of two buffers, and replayed.
WARM_UP_STEPS = 4


def decode(
    session: Session,
    sources: Iterable[Source],
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
    """Return the hypotheses of every source.

    They depend neither on other sources nor on `batch_size`. The arguments are those of `Model.generate_ids`, and:

    - `text_of`: decodes token ids, for stop strings.
    - `num_fixed`: tokens of each prefix that its hypotheses begin with, even if they are only biased towards the rest.
    - `places`: places of the sources for the seeds of samples; None for 0, 1, ….
    """
    check_call("decode", batch_size=batch_size, on_progress=on_progress, cancel=cancel)
    requests = check_requests(session, sources, config, prefixes, text_of, num_fixed)
    if places is not None:
        requests = [dataclasses.replace(one, place=place) for one, place in zip(requests, places, strict=True)]
    results: list[dict[int, list[Hypothesis]]] = [{} for _ in requests]
    samples = config.num_return_sequences if config.do_sample or config.return_alternatives else 1
    loop = Loop(session, batch_size * samples)
    requests = with_languages(session, requests, batch_size, cancel)
    if config.return_alternatives:
        requests = alternatives(session, requests, batch_size, cancel)
    elif samples > 1:
        requests = [dataclasses.replace(request, sample=sample) for request in requests for sample in range(samples)]
    wanted = Counter(request.text for request in requests) if on_progress else {}
    # Longest first: texts of about equal length are decoded together, and the shortest ones last.
    requests.sort(key=lambda request: -request.source_length)
    loop.submit(requests)
    for updates in run_loop(loop, cancel):
        finished = 0
        for update in updates:
            if isinstance(update.outcome, TfexportError):
                raise update.outcome
            assert update.outcome is not None
            found = results[update.request.text]
            found[update.request.sample] = update.outcome
            finished += len(found) == wanted.get(update.request.text)
        if finished and on_progress:
            on_progress(finished)
    return [[best for sample in sorted(found) for best in found[sample]] for found in results]


def with_languages(
    session: Session, requests: Sequence[Request], batch_size: int, cancel: threading.Event | None = None
) -> list[Request]:
    """Insert the likeliest language into each prompt that lacks one.

    It is the best language after the start token, as in transformers.
    """
    spec, found = session.spec, list(requests)
    waiting = [place for place, request in enumerate(found) if request.lacks_language]
    size = min(batch_size, session.limits.rows.most or batch_size)
    for first in range(0, len(waiting), size):
        check_cancelled(cancel)
        places = waiting[first : first + size]
        some = [found[place] for place in places]
        batch = session.batch()
        batch.add(pad_sources(spec.source, [one.source for one in some]), [one.prompt[:1] for one in some])
        wanted = min(spec.vocab, session.limits.candidates.most or spec.vocab)
        best = batch.step(np.array([one.prompt[0] for one in some]), wanted)
        if (broken := is_broken(best)) is not None:
            raise nan_error(some[int(broken.argmax())], 0)
        assert spec.speech is not None
        is_language = np.isin(best.token_ids, spec.speech.language_ids)
        for place, request, token_ids, languages in zip(places, some, best.token_ids, is_language, strict=True):
            if not languages.any():
                problem = f"no language is among the best {wanted} tokens of {request.name}; give the language"
                raise InputError(f"decode: {problem}", indices=[request.text])
            language = int(token_ids[languages.argmax()])
            found[place] = dataclasses.replace(
                request,
                prompt=_inserted(request.prompt, language),
                biased_prefix=_inserted(request.biased_prefix, language),
                lacks_language=False,
            )
    return found


def _inserted(prompt: tuple[int, ...], language: int) -> tuple[int, ...]:
    return (*prompt[:1], language, *prompt[1:]) if prompt else ()


def alternatives(
    session: Session, requests: Sequence[Request], batch_size: int, cancel: threading.Event | None = None
) -> list[Request]:
    """Replace each request by one request per alternative next token.

    Each new prompt ends with its token, which counts as generated; `sample` is its rank.
    """
    most = session.limits.rows.most
    size = batch_size if most is None else min(batch_size, most)
    # A text that its forced token completes has no next token. Some sessions take only equally long prompts.
    expanded = [request for request in requests if request.is_answered]
    waiting = [request for request in requests if not request.is_answered]
    waiting.sort(key=lambda request: (len(request.prompt), request.source_length))
    for _, group in groupby(waiting, lambda request: len(request.prompt)):
        while some := list(islice(group, size)):
            check_cancelled(cancel)
            for request, token_ids, log_probs in zip(some, *_next_tokens(session, some), strict=True):
                expanded += _expand(session, request, token_ids, log_probs)
    return expanded


def _next_tokens(session: Session, requests: Sequence[Request]) -> tuple[Ids, Floats]:
    spec, config = session.spec, requests[0].config
    processors, history, batch = Processors(config, spec), History(spec.vocab), session.batch()
    history.add(request.prompt for request in requests)
    processors.add(requests)
    batch.add(pad_sources(spec.source, [one.source for one in requests]), [one.prompt for one in requests])
    found = batch.step(history.newest, processors.num_candidates(config.num_return_sequences, history))
    broken = is_broken(found)
    if broken is not None:
        request = requests[int(broken.argmax())]
        raise nan_error(request, request.num_forced)
    num_new = np.array([request.num_forced for request in requests])
    limits = np.array([request.max_new_tokens for request in requests])
    return processors.apply(found, history, num_new, limits)


def _expand(session: Session, request: Request, token_ids: Ids, log_probs: Floats) -> list[Request]:
    config, num_new = request.config, request.num_forced + 1
    ends = config.ends(session.spec.tokens.eos)
    allowed = [pair for pair in zip(token_ids.tolist(), log_probs.tolist(), strict=True) if pair[1] > -np.inf]
    if not allowed:
        raise no_token_error(request, request.num_forced)
    single = dataclasses.replace(config, return_alternatives=False, num_return_sequences=1, begin_suppress_tokens=())
    expanded = []
    for rank, (token, log_prob) in enumerate(allowed[: config.num_return_sequences]):
        prompt = (*request.prompt, token)
        is_last = token in ends or num_new == request.max_new_tokens or is_stopped(request, prompt[1:])
        changes = {"prompt": prompt, "config": single, "num_forced": num_new, "log_prob": log_prob}
        expanded.append(dataclasses.replace(request, **changes, is_answered=is_last, sample=rank))
    return expanded


def stream(
    session: Session,
    source: Source,
    config: DecodeConfig,
    *,
    prefix: Iterable[int] = (),
    text_of: TextOf | None = None,
    num_fixed: int = 0,
    defaults: Collection[str] = (),
    cancel: threading.Event | None = None,
) -> Iterator[int]:
    """Return an iterator over the `token_ids` that `decode` returns for one source."""
    check_call("stream", cancel=cancel)
    own = " (the model's default)"
    problems = [
        f"{name} is {getattr(config, name)}{own * (name in defaults)}, expected 1 for a stream; set it to 1"
        for name in ("num_beams", "num_return_sequences")
        if getattr(config, name) > 1
    ]
    raise_all(InputError, "stream", problems)
    (request,) = check_requests(session, [source], config, [prefix], text_of, num_fixed)
    return _tokens(session, dataclasses.replace(request, stream=True), cancel)


def _tokens(session: Session, request: Request, cancel: threading.Event | None) -> Iterator[int]:
    (request,) = with_languages(session, [request], 1, cancel)
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
        raise InputError(f"warm-up: source_len is {source_len}, the limit is {spec.max_source_length}; lower it")
    count = rows if most is None else min(rows, most)
    source = random_source(spec.source, np.random.default_rng(0), source_len)
    sources = pad_sources(spec.source, [source] * count)
    if not spec.has_decoder:
        session.hidden_states(sources)
        return
    batch, newest = session.batch(), np.full(count, spec.tokens.start)
    batch.add(sources, [[spec.tokens.start]] * count)
    for _ in range(min(WARM_UP_STEPS, spec.max_target_length)):
        newest = batch.step(newest, 1).token_ids[:, 0]
