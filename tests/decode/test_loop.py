"""The loop as a server uses it: requests that leave before they are done, and steps that are bounded."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.decode.scripted import ScriptedSession, drawn
from tests.runtime.joining import alone, differing, random_requests
from tfexport.decode._search import Outcome
from tfexport.decode.loop import Loop
from tfexport.decode.request import Request, Status, check_requests
from tfexport.generation import DecodeConfig

SESSION = ScriptedSession(16, drawn(16, eos_bias=-1))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 9))
def test_who_is_cancelled_leaves_and_nobody_else_changes(seed: int, places: int) -> None:
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
            leaving = [request for request in requests if rng.random() < 0.1 and request.text not in found]
            loop.cancel(leaving)
            cancelled |= {request.text for request in leaving}
            waiting = [request for request in waiting if request.text not in cancelled]
        for update in loop.step(int(rng.integers(1, 5))):
            assert update.request.text not in cancelled
            assert update.outcome is not None
            found[update.request.text] = update.outcome
    assert found.keys() | cancelled == expected.keys()
    assert not differing(found, {text: expected[text] for text in found})
    assert loop.num_rows == 0


def test_cancelling_all_leaves_nothing() -> None:
    requests = random_requests(SESSION, 12, 1)
    loop = Loop(SESSION, 2)
    loop.submit(requests)
    loop.step(1)
    assert loop.is_busy
    loop.cancel(requests)
    assert {request.status for request in requests} == {Status.CANCELLED}
    assert not loop.is_busy
    assert loop.num_rows == 0
    assert loop.step() == []


def answer(text: int, config: DecodeConfig, *, stream: bool) -> Request:
    (request,) = check_requests(SESSION, [[5, 6, 7 + text]], config)
    return dataclasses.replace(request, text=text, stream=stream)


@pytest.mark.parametrize("config", [DecodeConfig(), DecodeConfig(do_sample=True, seed=2)])
def test_those_that_stream_tell_each_token_and_the_others_none(config: DecodeConfig) -> None:
    requests = [answer(text, config, stream=text % 2 == 0) for text in range(6)]
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


def test_rows_are_counted_over_all_widths() -> None:
    loop = Loop(SESSION, 8)
    plain = DecodeConfig(min_new_tokens=4)
    loop.submit([answer(0, plain, stream=False), answer(1, plain, stream=False)])
    loop.submit([answer(2, dataclasses.replace(plain, num_beams=3), stream=False)])
    loop.admit()
    assert loop.num_rows == 5
    assert loop.can_join(1)
    assert loop.can_join(7)


def test_a_request_keeps_its_id_and_has_a_status_from_submission_to_answer() -> None:
    first, second = (answer(text, DecodeConfig(min_new_tokens=3), stream=True) for text in range(2))
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
