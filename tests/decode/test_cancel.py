"""A cancelled call ends at the next step; an event that is never set changes nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tfexport
from tests.decode.scripted import ScriptedBatch, ScriptedSession, drawn
from tfexport import Cancelled, Model
from tfexport.decode.loop import SEEN_WITHIN_S
from tfexport.decode.offline import decode, stream
from tfexport.decode.score import score
from tfexport.generation import DecodeConfig
from tfexport.runtime.session import Candidates, GreedySteps, Ids

VOCAB, STEP_S = 16, 0.002
SEARCHES = [
    DecodeConfig(min_new_tokens=10),
    DecodeConfig(min_new_tokens=10, num_beams=3),
    DecodeConfig(min_new_tokens=10, do_sample=True, num_return_sequences=2),
    DecodeConfig(min_new_tokens=10, return_alternatives=True, num_return_sequences=3),
]


class SeveralSteps(ScriptedBatch):
    """Takes several slow steps in one call."""

    def step(self, target_ids: Ids, num_candidates: int) -> Candidates:
        time.sleep(STEP_S)
        return super().step(target_ids, num_candidates)

    def multi_step(self, target_ids: Ids, steps: GreedySteps) -> Candidates:
        self.session.encoded.append((steps.most,))
        parts = []
        for _ in range(steps.most):
            parts.append(self.step(target_ids, steps.num_candidates))
            target_ids = parts[-1].token_ids[:, 0]
            if not steps.stop_ids.isdisjoint(target_ids.tolist()):
                break
        return Candidates(*(np.stack(some) for some in zip(*(vars(part).values() for part in parts), strict=True)))


class SeveralStepsSession(ScriptedSession):
    """A session of such batches; `encoded` also lists the number of requested steps."""

    def batch(self, width: int = 1) -> ScriptedBatch:
        return SeveralSteps(self, width)


def cancelled_after(steps: int, run: Callable[[ScriptedSession, threading.Event], object]) -> int:
    """Cancel a call during a step and return how many steps it took."""
    cancel = threading.Event()
    session = ScriptedSession(VOCAB, drawn(VOCAB))
    script = session.script

    def cancelling(source: tuple[int, ...], history: tuple[int, ...]) -> np.ndarray:
        if len(session.steps) == steps:
            cancel.set()
        return script(source, history)

    session.script = cancelling
    with pytest.raises(Cancelled, match="the call was cancelled"):
        run(session, cancel)
    return len(session.steps)


@pytest.mark.parametrize("config", SEARCHES)
@pytest.mark.parametrize("steps", [1, 4])
def test_a_call_ends_with_the_step_in_which_it_is_cancelled(config: DecodeConfig, steps: int) -> None:
    assert cancelled_after(steps, lambda session, cancel: decode(session, [[3], [4]], config, cancel=cancel)) == steps


def test_cancelling_scores_and_streams() -> None:
    targets, config = [[3] * 9, [4] * 12], DecodeConfig(min_new_tokens=10)
    assert cancelled_after(5, lambda session, cancel: score(session, [[3], [4]], targets, cancel=cancel)) == 5
    assert cancelled_after(5, lambda session, cancel: list(stream(session, [3], config, cancel=cancel))) == 5


def test_a_call_that_is_cancelled_beforehand_runs_nothing() -> None:
    cancel, session = threading.Event(), ScriptedSession(VOCAB, drawn(VOCAB))
    cancel.set()
    for config in SEARCHES:
        with pytest.raises(Cancelled):
            decode(session, [[3]], config, cancel=cancel)
    with pytest.raises(Cancelled):
        score(session, [[3]], [[4]], cancel=cancel)
    assert session.encoded == []


def test_an_event_that_is_never_set_changes_nothing() -> None:
    for config in SEARCHES:
        session = ScriptedSession(VOCAB, drawn(VOCAB))
        sources = [[3 + number] for number in range(7)]
        assert decode(session, sources, config, cancel=threading.Event()) == decode(session, sources, config)


def test_fewer_steps_are_taken_at_once_if_a_call_can_be_cancelled() -> None:
    config, session = DecodeConfig(), SeveralStepsSession(VOCAB, drawn(VOCAB, eos_bias=-1e3), max_target_length=60)
    expected = decode(session, [[3]], config)
    assert session.encoded[1:] == [(60,)]
    session.encoded.clear()
    assert decode(session, [[3]], config, cancel=threading.Event()) == expected
    requested = [steps for (steps,) in session.encoded[1:]]
    assert max(requested) <= SEEN_WITHIN_S / STEP_S
    assert len(requested) < 30  # still several at once


@pytest.fixture(scope="module")
def model(dates_bundle: Path) -> Iterator[Model]:
    with tfexport.load(dates_bundle, threads=1) as loaded:
        yield loaded


@pytest.mark.parametrize("options", [{}, {"num_beams": 4}, {"do_sample": True}])
def test_another_thread_ends_a_long_call_soon(model: Model, options: dict[str, Any]) -> None:
    cancel, set_at = threading.Event(), [0.0]

    def set_event() -> None:
        set_at[0] = time.perf_counter()
        cancel.set()

    timer = threading.Timer(0.1, set_event)
    timer.start()
    with pytest.raises(Cancelled):
        for _ in range(10_000):
            model.generate(["le 14 juillet 1989"] * 64, min_new_tokens=12, cancel=cancel, **options)
    assert time.perf_counter() - set_at[0] < 0.5
    timer.join()


def test_every_call_takes_an_event(model: Model, dates_aligned: Path) -> None:
    cancel = threading.Event()
    text, target = "le 14 juillet 1989", "1989-07-14"
    assert model.tokenizer is not None
    (source,), given = model.tokenizer.encode([text]), model.tokenizer.encode_target(target)
    aligned = tfexport.load(dates_aligned, threads=1)
    calls: list[Callable[[], object]] = [
        lambda: model.generate([text], cancel=cancel),
        lambda: model.generate_ids([source], cancel=cancel),
        lambda: list(model.stream(text, cancel=cancel)),
        lambda: list(model.stream_ids(source, cancel=cancel)),
        lambda: model.score([text], [target], cancel=cancel),
        lambda: model.score_ids([source], [given], cancel=cancel),
        lambda: aligned.align([text], [target], cancel=cancel),
        lambda: aligned.align_ids([source], [given], cancel=cancel),
    ]
    for call in calls:
        call()
    cancel.set()
    for call in calls:
        with pytest.raises(Cancelled):
            call()
    aligned.close()


def test_progress_may_cancel(model: Model) -> None:
    cancel, done = threading.Event(), list[int]()

    def progress(count: int) -> None:
        done.append(count)
        cancel.set()

    with pytest.raises(Cancelled):
        model.generate(["le 14 juillet 1989"] * 9, batch_size=2, on_progress=progress, cancel=cancel)
    assert sum(done) < 9
