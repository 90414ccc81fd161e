"""Test that sources are encoded on a second thread while running requests take steps."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tests.decode.scripted import ScriptedSession
from tests.serve.test_scheduler import Bench
from tfexport.decode.request import Status
from tfexport.decode.result import Hypothesis
from tfexport.errors import DeadlineExceeded, EngineFailed, QueueFull
from tfexport.runtime.sources import Sources
from tfexport.serve import _encoder
from tfexport.serve._scheduler import Worker
from tfexport.serve.observer import Observer

THREAD = "tfexport-encoder"


def encoder_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == THREAD}


class Ahead(ScriptedSession):
    """A session whose `encode_ahead` waits until `go_on` is set."""

    can_encode_ahead = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.go_on, self.ahead, self.error = threading.Event(), list[tuple[str, int]](), ""
        self.go_on.set()

    def encode_ahead(self, sources: Sources) -> Sources:
        self.ahead.append((threading.current_thread().name, len(sources)))
        assert self.go_on.wait(30)
        if self.error:
            raise ValueError(self.error)
        return sources


class AheadBench(Bench):
    def __init__(self, **config: int) -> None:
        super().__init__(kind=Ahead, **config)
        assert isinstance(self.session, Ahead)
        self.go_on, self.ahead = self.session.go_on, self.session.ahead

    def until(self, is_so: Callable[[], bool]) -> None:
        """Wait for the encoder's thread."""
        for _ in range(3000):
            if is_so():
                return
            time.sleep(0.01)
        raise AssertionError("the encoder's thread hangs")


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_encoder, "available_cores", lambda: 2)
    monkeypatch.setattr(_encoder, "COMPUTING", set())


@pytest.fixture
def before() -> set[threading.Thread]:
    """Give the threads of servers that other tests of this process share."""
    return encoder_threads()


@pytest.fixture
def bench(before: set[threading.Thread]) -> Iterator[AheadBench]:
    bench = AheadBench(slots=8)
    yield bench
    bench.go_on.set()
    bench.scheduler.close()
    assert encoder_threads() <= before


def test_running_requests_take_steps_while_sources_are_encoded(bench: AheadBench) -> None:
    bench.put(0)
    bench.step()
    bench.go_on.clear()
    for number in range(1, 4):
        bench.put(number, max_new_tokens=2)
    while len(bench.session.steps) < 6:
        bench.step()
    assert {rows for rows, _ in bench.session.steps} == {1}
    assert bench.scheduler.num_rows == 4
    bench.until(lambda: bench.ahead == [(THREAD, 3)])
    bench.put(4, max_new_tokens=2)  # waits until the encoder is free
    bench.step()
    assert bench.ahead == [(THREAD, 3)]
    bench.go_on.set()
    bench.until(lambda: bench.scheduler._encoder.is_done)
    bench.step()
    assert bench.session.steps[-1][0] == 4
    bench.run()
    assert len(bench.done) == 5


def test_a_lone_request_starts_no_thread(bench: AheadBench, before: set[threading.Thread]) -> None:
    for number in range(3):
        bench.put(number, max_new_tokens=3)
        bench.run()
    assert bench.ahead == []
    assert bench.session.encoded == [(1, 3)] * 3
    assert encoder_threads() <= before


def test_no_second_thread_takes_the_core_of_another_engine(bench: AheadBench) -> None:
    bench.put(0)
    bench.step()
    _encoder.COMPUTING.update({"this engine", "another engine"})
    bench.put(1)
    bench.step()
    assert bench.session.steps[-1][0] == 2
    assert bench.ahead == []
    _encoder.COMPUTING.remove("another engine")
    bench.put(2)
    bench.run()
    assert bench.ahead == [(THREAD, 1)]
    assert {"this engine"} == _encoder.COMPUTING


def test_an_engine_without_other_rows_waits_for_the_encoder(bench: AheadBench) -> None:
    bench.put(0, max_new_tokens=2)
    bench.step()
    bench.put(1, max_new_tokens=2)
    assert set(bench.run()) == {0, 1}
    assert bench.ahead == [(THREAD, 1)]


def test_requests_may_end_while_their_sources_are_encoded(bench: AheadBench) -> None:
    bench.put(0)
    bench.step()
    bench.go_on.clear()
    cancelled, _, late = bench.put(1), bench.put(2), bench.put(3, deadline=time.monotonic() + 0.05)
    bench.step()
    bench.until(lambda: bench.ahead == [(THREAD, 3)])
    cancelled.status = Status.CANCELLED
    time.sleep(0.06)
    bench.step()
    assert isinstance(bench.done[late.request.text], DeadlineExceeded)
    assert bench.scheduler.num_rows == 2
    bench.go_on.set()
    bench.run()
    assert bench.done.keys() == {0, 2, 3}
    assert len(bench.session.steps) < 40
    assert bench.scheduler.num_rows == 0


def test_all_requests_may_end_while_their_sources_are_encoded(bench: AheadBench) -> None:
    first = bench.put(0)
    bench.step()
    second = bench.put(1)
    bench.step()
    first.status = second.status = Status.CANCELLED
    bench.run()
    assert bench.done == {}
    bench.put(2, max_new_tokens=2)
    assert bench.run() == [2]


def test_results_do_not_depend_on_where_sources_are_encoded(bench: AheadBench) -> None:
    options: list[dict[str, object]] = [
        {},
        {"num_beams": 2},
        {"do_sample": True, "num_return_sequences": 3},
        {"return_alternatives": True, "num_return_sequences": 2},
        {"num_beams": 3, "num_return_sequences": 2},
        {"forced_bos_token_id": 7, "max_new_tokens": 1},  # needs no step
    ]
    plain = Bench(slots=8)
    for one in (bench, plain):
        for number in range(48):
            one.put(number, source_len=1 + number % 7, **{"max_new_tokens": 3 + number % 9} | options[number % 6])
            one.step(number % 3)
        one.run()
    assert len(bench.done) == 48
    assert bench.done == plain.done
    assert all(isinstance(best, Hypothesis) for found in bench.done.values() for best in found)  # type: ignore[attr-defined]
    assert sum(count for _, count in bench.ahead) > 20
    assert plain.session.encoded


def test_an_error_of_the_encoder_ends_the_engine(before: set[threading.Thread]) -> None:
    bench, failures = AheadBench(slots=8), list[EngineFailed]()
    assert isinstance(bench.session, Ahead)
    bench.session.error = "no memory"
    worker = Worker(bench.session, bench.config, Observer(), lambda events: None, failures.append)
    while worker.failure is None:  # until one arrives while another runs
        with contextlib.suppress(EngineFailed, QueueFull):
            worker.waiting.put(bench.job(0))
        time.sleep(0.001)
    assert worker.join(30)
    assert isinstance(worker.failure, ValueError)
    assert not _encoder.COMPUTING
    assert len(failures) == 1
    assert encoder_threads() <= before
