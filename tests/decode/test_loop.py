"""The loop as a server uses it: cancelled requests, streams, statuses and a limit of steps."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.decode.scripted import ScriptedSession, drawn
from tests.runtime.joining import alone, differing, random_requests
from tfexport.decode import _options
from tfexport.decode._search import Outcome
from tfexport.decode.loop import Loop
from tfexport.decode.request import Request, Status, check_requests
from tfexport.generation import DecodeConfig

SESSION = ScriptedSession(16, drawn(16, eos_bias=-1))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 9))
def test_cancelled_requests_are_removed_and_others_do_not_change(seed: int, places: int) -> None:
    rng = np.random.default_rng(seed)
    requests = random_requests(SESSION, 24, seed)
    expected = alone(SESSION, requests)
    loop, waiting, found = Loop(SESSION, places), list(requests), dict[int, Outcome]()
    cancelled: set[int] = set()
    while waiting or loop.is_busy:
        if waiting:
            count = int(rng.integers(1, 6))
            loop.submit(waiting[:count])
            del waiting[:count]
        if rng.random() < 0.4:
            chosen = [request for request in requests if rng.random() < 0.1 and request.text not in found]
            loop.cancel(chosen)
            cancelled |= {request.text for request in chosen}
            waiting = [request for request in waiting if request.text not in cancelled]
        for update in loop.step(int(rng.integers(1, 5))):
            assert update.request.text not in cancelled
            assert update.outcome is not None
            found[update.request.text] = update.outcome
    assert found.keys() | cancelled == expected.keys()
    assert not differing(found, {text: expected[text] for text in found})
    assert loop.num_rows == 0


def make_request(text: int, config: DecodeConfig, *, stream: bool) -> Request:
    (request,) = check_requests(SESSION, [[5, 6, 7 + text]], config)
    return dataclasses.replace(request, text=text, stream=stream)


def test_cancelling_all_requests_empties_the_loop() -> None:
    plain, wide = DecodeConfig(min_new_tokens=4), DecodeConfig(min_new_tokens=4, num_beams=3)
    requests = [make_request(text, wide if text == 2 else plain, stream=False) for text in range(9)]
    loop = Loop(SESSION, 2)
    loop.submit(requests)
    loop.admit()
    assert (loop.num_rows, loop.can_join(1), loop.can_join(7)) == (5, True, True)
    loop.step(1)
    loop.cancel(requests)
    assert {request.status for request in requests} == {Status.CANCELLED}
    assert (loop.is_busy, loop.num_rows, loop.step()) == (False, 0, [])


@pytest.mark.parametrize("config", [DecodeConfig(), DecodeConfig(do_sample=True, seed=2)])
def test_only_streams_report_each_token(config: DecodeConfig) -> None:
    requests = [make_request(text, config, stream=text % 2 == 0) for text in range(6)]
    loop, tokens, outcomes = Loop(SESSION, 6), dict[int, list[int]](), dict[int, Outcome]()
    loop.submit(requests)
    while loop.is_busy:
        for update in loop.step():
            if update.token_id is not None:
                tokens.setdefault(update.request.text, []).append(update.token_id)
            if update.outcome is not None:
                outcomes[update.request.text] = update.outcome
    assert tokens.keys() == {0, 2, 4}
    for text, seen in tokens.items():
        (best,) = outcomes[text]
        assert tuple(seen) == best.token_ids
    assert not differing(outcomes, alone(SESSION, requests))


def test_ids_and_statuses_of_requests() -> None:
    first, second = (make_request(text, DecodeConfig(min_new_tokens=3), stream=True) for text in range(2))
    assert first.id != second.id != dataclasses.replace(second).id
    loop, seen = Loop(SESSION, 1), [Status.WAITING]
    loop.submit([first, second])
    assert first.status is second.status is Status.WAITING
    while loop.is_busy:
        updates = loop.step(1)
        assert all(update.request in (first, second) for update in updates)
        seen += [first.status] * (first.status is not seen[-1])
    assert seen == [Status.WAITING, Status.RUNNING, Status.DONE]
    assert second.status is Status.DONE


def differing_rows(rng: np.random.Generator) -> list[DecodeConfig]:
    """Return options of 30 rows of five kinds, each row with values of its own."""
    kinds: list[dict[str, object]] = []
    for row in range(6):
        tokens = tuple(rng.choice(np.arange(3, 16), 2, replace=False).tolist())
        kinds += [
            {"repetition_penalty": 1.1 + row / 5},
            {"no_repeat_ngram_size": 1 + row % 3, "suppress_tokens": tokens},
            {"min_new_tokens": 1 + row, "bad_words_ids": ((tokens[0],),)},
            {"min_length": 2 + row, "begin_suppress_tokens": tokens},
            {"do_sample": True, "seed": row, "temperature": 0.5 + row / 4, "top_k": 3 + row, "top_p": 0.5 + row / 12},
        ]
    return [DecodeConfig(**one) for one in kinds]


def test_rows_with_values_of_their_own_share_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [
        make_request(text, one, stream=False) for text, one in enumerate(differing_rows(np.random.default_rng(3)))
    ]
    expected = alone(SESSION, requests)
    calls: Counter[str] = Counter()
    for name in ("RepetitionPenalty", "NoRepeatNgram", "Suppress", "MinLength"):
        kind = getattr(_options, name)

        def counted(self: _options.Processor, *arguments: Any, apply: Any = kind.apply) -> Any:
            calls[type(self).__name__] += 1
            return apply(self, *arguments)

        monkeypatch.setattr(kind, "apply", counted)
    loop, found = Loop(SESSION, 30), dict[int, Outcome]()
    loop.submit(requests)
    found |= {update.request.text: update.outcome for update in loop.step(1) if update.outcome is not None}
    # MinLength is of two kinds, those of min_new_tokens and of min_length, and Suppress of two.
    assert calls == {"RepetitionPenalty": 1, "NoRepeatNgram": 1, "Suppress": 2, "MinLength": 2}
    while loop.is_busy:
        found |= {update.request.text: update.outcome for update in loop.step() if update.outcome is not None}
    assert not differing(found, expected)
