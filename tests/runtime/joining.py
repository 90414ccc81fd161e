"""Random requests that join and leave batches, and the same requests alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from tfexport.decode._search import Outcome
from tfexport.decode.loop import Loop
from tfexport.decode.request import Request, check_requests
from tfexport.generation import DecodeConfig
from tfexport.runtime.session import EncodesAhead, Session
from tfexport.runtime.sources import pad_sources, random_source

# Every row of a batch may have another one.
KINDS = (
    DecodeConfig(),
    DecodeConfig(no_repeat_ngram_size=2, min_new_tokens=2),
    DecodeConfig(repetition_penalty=1.3, suppress_tokens=(5, 7)),
    DecodeConfig(do_sample=True, temperature=1.2, top_k=8, seed=3),
    DecodeConfig(num_beams=2),
    DecodeConfig(num_beams=2, length_penalty=0.5, no_repeat_ngram_size=2),
    DecodeConfig(num_beams=4, num_return_sequences=2, early_stopping="never"),
)


def random_requests(session: Session, count: int, seed: int) -> list[Request]:
    """Draw sources of all lengths, prefixes of up to three tokens, limits and kinds."""
    rng, spec = np.random.default_rng(seed), session.spec
    requests = []
    for text in range(count):
        prefix = rng.integers(3, spec.vocab, rng.integers(0, 4)).tolist()
        room = spec.max_target_length - len(prefix)
        config = dataclasses.replace(KINDS[rng.integers(len(KINDS))], max_new_tokens=int(rng.integers(2, room + 1)))
        source = random_source(spec.source, rng, int(rng.integers(1, spec.max_source_length + 1)))
        (request,) = check_requests(session, [source], config, [prefix])
        requests.append(dataclasses.replace(request, text=text))
    return requests


def alone(session: Session, requests: Sequence[Request]) -> dict[int, Outcome]:
    """Decode each request in a batch of its own."""
    found: dict[int, Outcome] = {}
    for request in requests:
        found |= joining(session, [request], 0, places=1)
    return found


def joining(
    session: Session, requests: Sequence[Request], seed: int, *, places: int = 6, is_ahead: bool = False
) -> dict[int, Outcome]:
    """Submit requests in random order, a few at a time between steps, while others are decoded.

    With `is_ahead` their sources are encoded before they join, and `places` is ignored.
    """
    rng = np.random.default_rng(seed)
    waiting = [requests[number] for number in rng.permutation(len(requests))]
    loop, found = Loop(session, places), {}
    while waiting or loop.is_busy:
        if waiting and (not loop.is_busy or rng.random() < 0.4):
            count = int(rng.integers(1, 4))
            if is_ahead:
                _join(session, loop, waiting[:count])
            else:
                loop.submit(waiting[:count])
            del waiting[:count]
        found |= {update.request.text: update.outcome for update in loop.step() if update.outcome is not None}
    return found


def _join(session: Session, loop: Loop, requests: Sequence[Request]) -> None:
    assert isinstance(session, EncodesAhead)
    for width in {request.config.num_beams for request in requests}:
        some = [request for request in requests if request.config.num_beams == width]
        sources = pad_sources(session.spec.source, [request.source for request in some])
        loop.join(some, session.encode_ahead(sources))


def differing(left: dict[int, Outcome], right: dict[int, Outcome]) -> list[int]:
    """Return the texts whose hypotheses have other ids, or other ends."""
    assert left.keys() == right.keys()

    def result_of(outcome: Outcome) -> object:
        return [(best.token_ids, best.finish_reason) for best in outcome] if isinstance(outcome, list) else str(outcome)

    return [text for text in left if result_of(left[text]) != result_of(right[text])]
