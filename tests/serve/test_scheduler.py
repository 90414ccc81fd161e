"""Test when jobs join and leave the running batches."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.decode.scripted import ScriptedSession, drawn
from tfexport.decode.request import Status, check_requests
from tfexport.errors import DeadlineExceeded, Draining, QueueFull
from tfexport.generation import DecodeConfig
from tfexport.serve._generation import Event, Generation
from tfexport.serve._scheduler import HELD_STEPS, Scheduler, WaitingQueue, Worker
from tfexport.serve.config import ServingConfig
from tfexport.serve.observer import Observer


class Bench:
    """A scheduler without its thread, on a session whose texts are 15 tokens long unless told otherwise."""

    def __init__(self, *, can_join: bool = True, kind: type[ScriptedSession] = ScriptedSession, **config: int) -> None:
        self.session = kind(16, drawn(16, eos_bias=-1e9), can_join=can_join)
        self.config = ServingConfig(**config)
        self.queue = WaitingQueue(self.config.max_waiting, self.config.max_waiting_tokens)
        self.scheduler = Scheduler(self.session, self.queue, self.config, Observer())
        self.done: dict[int, object] = {}

    def job(
        self, number: int, *, source_len: int = 3, priority: float = 0.0, deadline: float = 1e99, **options: object
    ) -> Generation:
        config = DecodeConfig.from_dict(options)
        (request,) = check_requests(self.session, [[5] * source_len], config)
        return Generation(dataclasses.replace(request, text=number), number * 1e-3, priority, deadline)

    def put(self, number: int, **options: Any) -> Generation:
        job = self.job(number, **options)
        self.queue.put(job)
        return job

    def step(self, most: int = 1) -> list[Event]:
        events = []
        for _ in range(most):
            events += self.scheduler.step()
        self.done |= {event.generation.request.text: event.outcome for event in events if event.outcome is not None}
        return events

    def run(self) -> list[int]:
        for _ in range(1000):
            self.step()
            if not self.scheduler.is_busy:
                return list(self.done)
        raise AssertionError("somebody waits for ever")

    def encoded_between_steps(self) -> Iterator[int]:
        """Take all steps; tell of each how many source tokens were encoded before it, padding included."""
        while self.scheduler.is_busy:
            before = len(self.session.encoded)
            self.step()
            yield sum(rows * length for rows, length in self.session.encoded[before:])


def test_a_wide_request_is_not_starved_by_narrow_ones() -> None:
    bench = Bench(slots=8)
    for number in range(6):
        bench.put(number, max_new_tokens=3 + number)
    bench.step()
    bench.put(10, num_beams=8, max_new_tokens=2)
    for number in range(11, 60):
        bench.put(number, max_new_tokens=3)
        bench.step()
    done = bench.run()
    assert done.index(10) <= 8


def test_low_priority_is_served_when_it_is_older_by_more_than_the_difference() -> None:
    bench = Bench(slots=1)
    bench.put(0, max_new_tokens=1)
    for number in range(1, 100):  # a millisecond younger each, and 20 ms more urgent
        bench.put(number, priority=0.02, max_new_tokens=1)
    done = bench.run()
    assert done.index(0) in (19, 20)
    assert done[-1] == 99


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_beams": 4},
        {"do_sample": True, "num_return_sequences": 6},
        {"return_alternatives": True, "num_return_sequences": 6},
    ],
)
def test_a_burst_stalls_running_rows_by_the_budget_at_most(options: dict[str, object]) -> None:
    bench = Bench(slots=64, encoder_budget=40, max_waiting=1000)
    bench.put(0, max_new_tokens=15)
    bench.step()
    for number in range(1, 65):
        bench.put(number, source_len=1 + number % 16, max_new_tokens=2, **options)
    encoded = list(bench.encoded_between_steps())
    assert len(bench.done) == 65
    assert max(encoded) <= 40
    assert max(encoded) > 20


def test_a_source_above_the_budget_is_encoded_alone() -> None:
    bench = Bench(slots=8, encoder_budget=4)
    for number in range(5):
        bench.put(number, source_len=9, max_new_tokens=2)
    assert set(bench.encoded_between_steps()) == {9, 0}
    assert len(bench.done) == 5


def test_closed_batches_have_at_most_as_many_rows_as_slots() -> None:
    bench = Bench(slots=4, can_join=False)
    for number in range(4):  # forced tokens make prompts unequal: two batches, one after the other
        bench.put(number, max_new_tokens=5, forced_bos_token_id=7 if number % 2 else None)
    bench.put(4, num_beams=2, max_new_tokens=5)
    bench.step()
    assert bench.scheduler.num_rows == 4
    assert [rows for rows, _ in bench.session.steps] == [2]
    bench.run()
    assert len(bench.done) == 5


def test_no_more_rows_are_decoded_than_there_are_slots() -> None:
    bench = Bench(slots=8, encoder_budget=10_000)
    for number in range(30):
        several: dict[str, object] = {"do_sample": True, "num_return_sequences": 3}
        options = ({"num_beams": 5}, several, {}, {"num_beams": 3})[number % 4]
        bench.put(number, max_new_tokens=2 + number % 3, **options)
    most = 0
    while bench.scheduler.is_busy:
        before = len(bench.session.steps)
        bench.step()
        most = max(most, sum(rows for rows, _ in bench.session.steps[before:]))
    assert most == 8
    assert len(bench.done) == 30


def test_free_slots_wait_a_limited_number_of_steps() -> None:
    bench = Bench(slots=32, encoder_budget=10_000)
    for number in range(30):
        bench.put(number, max_new_tokens=15)
    bench.step()
    for number in range(30, 40):
        bench.put(number, max_new_tokens=1)
    bench.step()
    assert bench.scheduler.num_rows == 30
    bench.step(HELD_STEPS)
    assert bench.done.keys() >= {30, 31}


def test_a_slot_that_is_free_is_used_in_the_next_step() -> None:
    bench = Bench(slots=8, encoder_budget=10_000)
    for number in range(20):
        bench.put(number, max_new_tokens=2)
    used = []
    while bench.scheduler.is_busy:
        bench.step()
        used.append(bench.session.steps[-1][0])
    assert used == [8, 8, 8, 8, 4, 4]


def test_a_job_leaves_between_two_steps_with_all_its_parts() -> None:
    bench = Bench(slots=16, encoder_budget=6)
    job = bench.put(0, do_sample=True, num_return_sequences=6)
    other = bench.put(1, max_new_tokens=4)
    bench.step()  # two of the six are encoded
    assert bench.scheduler.num_rows == 6
    job.status = Status.CANCELLED
    bench.step()
    assert bench.scheduler.num_rows == 1
    bench.run()
    assert list(bench.done) == [other.request.text]
    assert bench.scheduler.num_rows == 0


def test_a_deadline_ends_running_and_waiting_requests() -> None:
    bench = Bench(slots=1)
    bench.put(0, deadline=time.monotonic() + 0.05)
    waiting = bench.put(1, deadline=time.monotonic() + 0.05)
    bench.step()
    assert not bench.done
    time.sleep(0.06)
    bench.step()
    assert isinstance(bench.done[0], DeadlineExceeded)
    assert "while decoding" in str(bench.done[0])
    assert isinstance(bench.done[1], DeadlineExceeded)
    assert "before decoding began" in str(bench.done[1])
    assert len(bench.session.encoded) == 1
    assert not bench.scheduler.is_busy
    assert waiting.parts == []


def test_failed_alternatives_affect_only_their_job() -> None:
    bench = Bench(slots=8)
    bench.put(0, max_new_tokens=3)
    bench.put(1, return_alternatives=True, num_return_sequences=2, suppress_tokens=list(range(16)))
    bench.put(2, max_new_tokens=3)
    bench.run()
    assert "no token to choose from" in str(bench.done[1])
    assert isinstance(bench.done[0], list)
    assert isinstance(bench.done[2], list)


def test_the_queue_counts_source_tokens_of_waiting_requests() -> None:
    bench = Bench(slots=1, max_waiting_tokens=20)
    first = bench.put(0, source_len=10)
    bench.put(1, source_len=10)
    with pytest.raises(QueueFull, match="2 requests with 20 source tokens are waiting"):
        bench.put(2, source_len=1)
    assert bench.queue.cancel(first)
    assert not bench.queue.cancel(first)
    late = bench.put(3, source_len=10, deadline=0.0)
    assert bench.queue.take_late(1.0) == [late]
    bench.put(4, source_len=10)
    assert bench.queue.take(lambda jobs: jobs[:1])[0].request.text == 1
    bench.put(5, source_len=10)
    assert (len(bench.queue), bench.queue.num_rows) == (2, 2)
    with pytest.raises(QueueFull):
        bench.put(6, do_sample=True, num_return_sequences=2)


def test_a_source_counts_as_often_as_it_is_encoded() -> None:
    bench = Bench(max_waiting_tokens=20)
    bench.put(0, source_len=3)
    for options in ({"do_sample": True}, {"return_alternatives": True}):
        with pytest.raises(QueueFull):
            bench.put(1, source_len=3, num_return_sequences=6, **options)
    with pytest.raises(QueueFull):  # once more, to find them
        bench.put(1, source_len=3, num_return_sequences=5, return_alternatives=True)
    bench.put(1, source_len=3, num_return_sequences=5, do_sample=True)
    Bench(max_waiting_tokens=5).put(0, source_len=16)  # a single job may always wait


def test_retry_after_follows_from_finished_requests() -> None:
    bench = Bench(max_waiting=4)
    bench.queue._departed.extend([time.monotonic() - 3600] * 4)  # an hour ago
    for number in range(1, 5):
        bench.put(number)
    bench.queue.take(lambda jobs: jobs[:2])
    bench.put(5)
    bench.put(6)
    with pytest.raises(QueueFull) as full:
        bench.put(7)
    assert full.value.retry_after_s == 1


def test_a_worker_publishes_nothing_after_a_cancellation() -> None:
    bench, events = Bench(), list[Event]()
    worker = Worker(bench.session, bench.config, Observer(), events.extend, lambda failed: None)
    jobs = [bench.put(number, max_new_tokens=15) for number in range(40)]
    for job in jobs:
        worker.waiting.put(job)
        worker.waiting.cancel(job)
    worker.waiting.close(Draining("over"))
    assert worker.join(10)
    assert not [event for event in events if event.outcome is None]
    assert all(job.status is Status.CANCELLED for job in jobs)


def test_a_worker_that_is_aborted_takes_no_further_step() -> None:
    bench, events = Bench(), list[Event]()
    begun, go_on, script = threading.Event(), threading.Event(), bench.session.script

    def waiting(source: tuple[int, ...], history: tuple[int, ...]) -> np.ndarray:
        begun.set()
        assert go_on.wait(30)
        return script(source, history)

    bench.session.script = waiting
    worker = Worker(bench.session, bench.config, Observer(), events.extend, lambda failed: None)
    worker.waiting.put(bench.put(0))
    assert begun.wait(30)
    worker.abort(Draining("over"))
    go_on.set()
    assert worker.join(30)
    assert worker.failure is None
    assert (len(bench.session.steps), events) == (1, [])
