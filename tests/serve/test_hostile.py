"""What callers, models, tokenizers and observers may do wrong: it is their own request's business, and no other's."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from tests.serve.served import Outcomes, is_idle, serving, until
from tfexport.decode.loop import Loop
from tfexport.errors import (
    BackendError,
    Cancelled,
    ConfigError,
    Draining,
    EngineFailed,
    InputError,
    TfexportError,
)
from tfexport.model import Model
from tfexport.runtime.ort.contrib import ContribBatch
from tfexport.runtime.session import Candidates, Ids
from tfexport.serve.config import ServingConfig
from tfexport.serve.engine import Engine
from tfexport.serve.observer import Observer
from tfexport.serve.scheduler import Scheduler
from tfexport.text.tokenizer import Tokenizer

ENGINE_THREAD = "tfexport-engine"


# Of engines that other tests of this process have left to the collector.
BEFORE: set[threading.Thread] = set()


def engine_threads() -> list[threading.Thread]:
    """Return the threads of the engines of this test."""
    return [thread for thread in threading.enumerate() if thread.name == ENGINE_THREAD and thread not in BEFORE]


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Any:
    BEFORE.clear()
    BEFORE.update(engine_threads())
    yield
    gc.collect()
    for thread in engine_threads():
        thread.join(5)
        assert not thread.is_alive()


def text_of(found: list[Any]) -> list[str]:
    return [one.text for one in found]


# What a caller may give.

NONSENSE: tuple[tuple[str, dict[str, Any], type[TfexportError], str], ...] = (
    ("text", {"text": None}, InputError, "NoneType, expected a text"),
    ("text", {"text": b"1 May"}, InputError, "bytes, expected a text"),
    ("text", {"text": ["1 May"]}, InputError, "list, expected a text"),
    ("text", {"text": 5}, InputError, "int, expected a text"),
    ("text", {"text": ""}, InputError, "empty"),
    ("text", {"prefix": 5}, InputError, "prefix is int, expected a text"),
    ("text", {"prefix": b"20"}, InputError, "prefix is bytes, expected a text"),
    ("text", {"priority": float("nan")}, InputError, "priority is nan, expected seconds"),
    ("text", {"priority": float("inf")}, InputError, "priority is inf"),
    ("text", {"priority": 1e300}, InputError, r"priority is 1e\+300"),
    ("text", {"priority": "high"}, InputError, "priority is 'high'"),
    ("text", {"priority": None}, InputError, "priority is None"),
    ("text", {"priority": True}, InputError, "priority is True"),
    ("text", {"timeout_s": 0}, InputError, "timeout_s is 0, expected"),
    ("text", {"timeout_s": -1.0}, InputError, "timeout_s is -1.0"),
    ("text", {"timeout_s": float("nan")}, InputError, "timeout_s is nan"),
    ("text", {"timeout_s": float("inf")}, InputError, "timeout_s is inf"),
    ("text", {"timeout_s": 10**400}, InputError, "timeout_s is 1000"),
    ("text", {"timeout_s": "5"}, InputError, "timeout_s is '5'"),
    ("text", {"config": 5}, ConfigError, "config is 5, expected a DecodeConfig"),
    ("text", {"num_beams": {1}}, ConfigError, "num_beams"),
    ("text", {"stop_strings": {"a": 1}}, ConfigError, "stop_strings"),
    ("text", {"max_time": float("nan")}, ConfigError, "max_time"),
    ("ids", {"source": None}, InputError, "source is None, expected a list of token ids"),
    ("ids", {"source": 5}, InputError, "source is 5"),
    ("ids", {"source": "567"}, InputError, "source is '567', expected a list"),
    ("ids", {"source": b"\x05\x06"}, InputError, "source is b'"),
    ("ids", {"source": {5, 6}}, InputError, "source is {5, 6}"),
    ("ids", {"source": {5: 6}}, InputError, "source is {5: 6}"),
    ("ids", {"source": iter([5])}, InputError, "source is <list_iterator"),
    ("ids", {"source": np.array(5)}, InputError, "source is array"),
    ("ids", {"source": np.array([[5]])}, InputError, "source is array"),
    ("ids", {"source": [[5]]}, InputError, r"source has \[5\], expected ids"),
    ("ids", {"source": [5.0]}, InputError, "source has 5.0"),
    ("ids", {"source": [True]}, InputError, "source has True"),
    ("ids", {"source": [-1]}, InputError, "source has -1"),
    ("ids", {"source": [10**30]}, InputError, "source has 1000"),
    ("ids", {"source": []}, InputError, "the source is empty"),
    ("ids", {"prefix": None}, InputError, "prefix is None, expected a list"),
    ("ids", {"prefix": "20"}, InputError, "prefix is '20'"),
    ("ids", {"prefix": [None]}, InputError, "prefix has None"),
)


def test_nonsense_is_refused_in_one_line_and_counted_as_invalid(dates_bundle: Path, texts: list[str]) -> None:
    observer = Outcomes()

    async def use(engine: Engine) -> None:
        for kind, given, error, says in NONSENSE:
            with pytest.raises(error, match=says) as refused:
                if kind == "text":
                    engine.submit(**({"text": texts[0]} | given))
                else:
                    engine.submit_ids(**({"source": [5, 6]} | given))
            assert "\n" not in str(refused.value)
        assert is_idle(engine)
        assert await engine.generate_ids(np.array([5, 6]), prefix=range(5, 7))  # type: ignore[arg-type]

    serving(dates_bundle, use, observer)
    assert observer.counts == {"invalid": len(NONSENSE), "ok": 1}


def test_an_engine_is_asked_on_its_own_event_loop(dates_bundle: Path, texts: list[str]) -> None:
    async def use(engine: Engine) -> None:
        async def ask() -> None:
            engine.submit(texts[0])

        async def replace() -> None:
            await engine.replace()

        for asked in (lambda: asyncio.run(ask()), lambda: engine.submit(texts[0]), lambda: asyncio.run(replace())):
            with pytest.raises(EngineFailed, match="event loop that it was started on"):
                await asyncio.to_thread(asked)
        assert is_idle(engine)

    serving(dates_bundle, use)


def test_an_engine_is_started_once_and_not_after_it_was_drained(dates_bundle: Path) -> None:
    async def use(engine: Engine) -> None:
        with pytest.raises(EngineFailed, match="started once"):
            await engine.start()

    serving(dates_bundle, use)

    async def drained_before_it_is_ready() -> None:
        engine = Engine(dates_bundle, threads=1)
        starting = asyncio.create_task(engine.start())
        await asyncio.sleep(0)
        assert await engine.drain()
        with pytest.raises(Draining, match="before it was ready"):
            await starting
        assert engine.state == "stopped"
        with pytest.raises(EngineFailed, match="started once"):
            await engine.start()

    asyncio.run(drained_before_it_is_ready())


def test_an_engine_that_was_not_started_replaces_nothing(dates_bundle: Path) -> None:
    async def use() -> None:
        with pytest.raises(EngineFailed, match="not started"):
            await Engine(dates_bundle).replace()

    asyncio.run(use())


# How a caller may wait, and stop waiting.


def test_a_generation_is_awaited_and_read_in_any_way(dates_bundle: Path, model: Model, texts: list[str]) -> None:
    expected = text_of(model.generate([texts[0]]))

    async def use(engine: Engine) -> None:
        generation = engine.submit(texts[0], stream=True)

        async def read() -> str:
            return "".join([piece async for piece in generation])

        async def wait() -> list[Any]:
            return await generation

        pieces, more, found, again = await asyncio.gather(read(), read(), wait(), wait())
        assert sorted((pieces + more, more + pieces), key=lambda one: one != expected[0])[0] == expected[0]
        assert text_of(found) == text_of(again) == text_of(await generation) == expected
        assert await read() == ""
        generation.cancel()
        assert text_of(await generation) == expected
        assert [piece async for piece in engine.submit(texts[0])] == []

    observer = Outcomes()
    serving(dates_bundle, use, observer)
    assert observer.counts == {"ok": 2}


@pytest.mark.parametrize("ticks", range(12))
def test_a_task_that_is_cancelled_takes_its_request_along(dates_bundle: Path, texts: list[str], ticks: int) -> None:
    async def use(engine: Engine) -> None:
        async def read() -> None:
            async for _ in engine.stream(texts[0]):
                await asyncio.sleep(0)

        async def read_whole() -> None:
            await engine.generate(texts[0], num_beams=4)

        tasks = [asyncio.create_task(task()) for task in (read, read_whole)]
        for _ in range(ticks):
            await asyncio.sleep(0 if ticks < 6 else 0.0005)
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(end is None or isinstance(end, asyncio.CancelledError) for end in ends)
        await until(lambda: is_idle(engine))
        await engine.generate(texts[0])

    serving(dates_bundle, use)


def test_a_waiter_that_is_cancelled_frees_its_slot(random_bundle: Path) -> None:
    observer = Outcomes()

    async def use(engine: Engine) -> None:
        task = asyncio.create_task(engine.generate_ids([5, 6]))
        await until(lambda: engine.num_slots_used > 0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: is_idle(engine))

    serving(random_bundle, use, observer)
    assert observer.counts == {"cancelled": 1}


def test_a_reader_that_stops_in_any_way_frees_its_slot(random_bundle: Path) -> None:
    observer = Outcomes()

    async def use(engine: Engine) -> None:
        async def first(stream: AsyncIterator[int]) -> None:
            async for _ in stream:
                return

        async def failing(stream: AsyncIterator[int]) -> None:
            async for _ in stream:
                raise KeyError

        await first(engine.stream_ids([5, 6]))
        with pytest.raises(KeyError):
            await failing(engine.stream_ids([5, 6]))
        closed = cast(Any, engine.stream_ids([5, 6]))
        await anext(closed)
        await closed.aclose()
        generation = engine.submit_ids([5, 6], stream=True)
        with pytest.raises(Cancelled):
            async for _ in generation:
                generation.cancel()
        engine.submit_ids([5, 6]).cancel()
        await until(lambda: is_idle(engine))

    serving(random_bundle, use, observer)
    assert observer.counts == {"cancelled": 5}


def test_a_long_prefix_is_no_slow_reader(random_bundle: Path) -> None:
    async def use(engine: Engine) -> None:
        generation = engine.submit_ids([5, 6], prefix=[7] * 40, stream=True, max_new_tokens=3)
        await asyncio.sleep(0.2)
        assert len([token async for token in generation]) == 43

    serving(random_bundle, use, stream_buffer=4)


# What fails.


def test_rows_that_compute_no_numbers_fail_alone(
    dates_bundle: Path, model: Model, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    poison = 7  # whose rows read it compute nothing
    step, multi = ContribBatch.step, ContribBatch.multi_step
    expected = {text: text_of(model.generate([text])) for text in texts}

    def broken(found: Candidates, target_ids: Ids) -> Candidates:
        found.logits[..., target_ids == poison, :] = np.nan
        return found

    monkeypatch.setattr(ContribBatch, "step", lambda batch, ids, count: broken(step(batch, ids, count), ids))
    monkeypatch.setattr(ContribBatch, "multi_step", lambda batch, ids, *rest: broken(multi(batch, ids, *rest), ids))

    async def use(engine: Engine) -> None:
        waiting = [(text, asyncio.ensure_future(engine.generate(text))) for text in texts]
        prefix = [6, poison]
        kinds: tuple[dict[str, Any], ...] = ({}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 3})
        failing = [engine.submit_ids([5, 6], prefix=prefix, **options) for options in (*kinds, {"stream": True})]
        for generation in failing:
            with pytest.raises(BackendError, match="NaN or infinite"):
                await generation
        handed_out = []
        with pytest.raises(BackendError, match="NaN"):
            async for token in failing[-1]:
                handed_out.append(token)  # noqa: PERF401
        assert handed_out == prefix
        ends = [poison in model.tokenizer.encode_target(one) for text in texts for one in expected[text]]  # type: ignore[union-attr]
        assert not all(ends)
        for (text, task), has_poison in zip(waiting, ends, strict=True):
            if not has_poison:
                assert text_of(await task) == expected[text]
        await asyncio.gather(*(task for _, task in waiting), return_exceptions=True)
        await until(lambda: is_idle(engine))
        assert engine.is_ready

    serving(dates_bundle, use, slots=64)


@pytest.mark.parametrize("name", ["add", "step", "remove", "reorder"])
@pytest.mark.parametrize("error", [BackendError("out of memory"), MemoryError("out of memory")])
def test_a_backend_that_fails_is_told_to_everybody(
    dates_bundle: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch, name: str, error: Exception
) -> None:
    def broken(*_: object) -> None:
        raise error

    observer = Outcomes()

    async def use(engine: Engine) -> None:
        await engine.generate(texts[0], num_beams=2)
        monkeypatch.setattr(ContribBatch, name, broken)

        async def ask(**options: Any) -> list[Any]:  # the thread may have failed before the next one is submitted
            return await engine.submit(texts[0], **options)

        asked = [ask(num_beams=2, max_new_tokens=3 + number) for number in range(6)]
        found = await asyncio.gather(*asked, ask(timeout_s=1e-7), return_exceptions=True)
        assert all(isinstance(one, TfexportError | list) for one in found)
        assert any(isinstance(one, EngineFailed) and "out of memory" in str(one) for one in found)
        assert engine.state == "failed"
        await until(lambda: is_idle(engine))
        with pytest.raises(EngineFailed):
            engine.submit(texts[0])

    serving(dates_bundle, use, observer, slots=4)
    assert sum(observer.counts.values()) == 9


def test_whoever_left_the_queue_hears_of_a_failure_too(
    dates_bundle: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise MemoryError("out of memory")

    async def use(engine: Engine) -> None:
        monkeypatch.setattr("tfexport.serve.job.alternatives", broken)
        options = {"return_alternatives": True, "num_return_sequences": 2}
        asked = [engine.submit(text, **options) for text in texts[:3]]  # type: ignore[arg-type]
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert all(isinstance(one, EngineFailed) for one in found)

    serving(dates_bundle, use)


def test_a_tokenizer_that_fails_ends_its_own_request_alone(
    dates_bundle: Path, model: Model, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, failing = Tokenizer.decode, model.generate([texts[0]])[0].token_ids
    expected = {text: text_of(model.generate([text])) for text in texts}

    def broken(tokenizer: Tokenizer, ids: Any) -> str:
        if tuple(ids)[:3] == failing[:3] and len(ids) > 3:
            raise ValueError("no such token")
        return decode(tokenizer, ids)

    good = [text for text in texts if model.generate([text])[0].token_ids[:3] != failing[:3]]
    assert len(good) > 4
    observer = Outcomes()

    async def use(engine: Engine) -> None:
        monkeypatch.setattr(Tokenizer, "decode", broken)
        broken_stream, whole = engine.submit(texts[0], stream=True), engine.submit(texts[0])
        others = [engine.submit(text, stream=number % 2 == 0) for number, text in enumerate(good)]
        for generation in (broken_stream, whole):
            with pytest.raises(BackendError, match="put into words: ValueError"):
                await generation
        for text, generation in zip(good, others, strict=True):
            assert text_of(await generation) == expected[text]
        with pytest.raises(BackendError, match="put into words"):
            _ = [piece async for piece in broken_stream]
        await until(lambda: is_idle(engine))

    serving(dates_bundle, use, observer)
    assert observer.counts == {"error": 2, "ok": len(good)}


def test_an_observer_that_fails_disturbs_nobody(
    dates_bundle: Path, model: Model, texts: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    class Raising(Observer):
        def ended(self, *_: object) -> None:
            raise ValueError

        joined = encoded = stepped = began = ended

    async def use(engine: Engine) -> None:
        found = await asyncio.gather(*(engine.generate(text) for text in texts))
        assert list(map(text_of, found)) == [text_of(model.generate([text])) for text in texts]
        with pytest.raises(InputError):
            engine.submit("")

    serving(dates_bundle, use, Raising())
    assert "the observer has failed" in caplog.text


def test_an_event_loop_that_is_closed_hears_nothing(random_bundle: Path) -> None:
    async def start() -> tuple[Engine, list[Any]]:
        engine = await Engine(random_bundle, ServingConfig(slots=1), threads=1).start()
        return engine, [engine.submit_ids([5, 6]) for _ in range(50)]

    with asyncio.Runner() as runner:
        engine, asked = runner.run(start())
    assert asyncio.run(engine.drain(30))
    assert not engine_threads()
    assert not all(generation.is_done for generation in asked)


def test_an_engine_that_nobody_holds_ends_its_thread(random_bundle: Path) -> None:
    async def start() -> Any:
        engine = await Engine(random_bundle, threads=1).start()
        engine.submit_ids([5, 6])
        return weakref.ref(engine)

    gone = asyncio.run(start())
    gc.collect()
    assert gone() is None
    for thread in engine_threads():
        thread.join(5)
    assert not engine_threads()


# How an engine ends, and what it is given instead.


def test_draining_in_no_time_loses_nothing_where_there_is_nothing(dates_bundle: Path, texts: list[str]) -> None:
    async def use(engine: Engine) -> None:
        await engine.generate(texts[0])
        assert await engine.drain(0)
        assert engine.state == "stopped"

    serving(dates_bundle, use)


def test_who_drains_a_second_time_cuts_the_first_short(random_bundle: Path) -> None:
    async def use(engine: Engine) -> None:
        asked = [engine.submit_ids([5, 6]) for _ in range(200)]
        first = asyncio.create_task(engine.drain())
        await asyncio.sleep(0.01)
        assert not await engine.drain(0)
        assert not await first
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert {type(one) for one in found} <= {Draining, list}
        assert any(isinstance(one, Draining) for one in found)
        assert is_idle(engine)

    observer = Outcomes()
    serving(random_bundle, use, observer, slots=1)
    assert sum(observer.counts.values()) == 200


def test_a_drain_that_is_cancelled_is_taken_up_again(random_bundle: Path) -> None:
    async def use(engine: Engine) -> None:
        asked = [engine.submit_ids([5, 6]) for _ in range(20)]
        first = asyncio.create_task(engine.drain())
        await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert engine.state == "draining"
        assert await engine.drain()
        assert all([await one for one in asked])

    serving(random_bundle, use, slots=2)


def test_each_answer_is_of_one_bundle(dates_bundle: Path, dates_fp16: Path, model: Model, texts: list[str]) -> None:
    from tfexport.model import load

    other = load(dates_fp16, threads=1)
    options = {"num_beams": 4, "num_return_sequences": 4}
    expected = [
        {text: [(one.text, round(one.score, 5)) for one in each.generate([text], **options)] for text in texts}  # type: ignore[arg-type]
        for each in (model, other)
    ]
    assert expected[0] != expected[1]

    async def use(engine: Engine) -> None:
        seen, done = [0, 0], list[bool]()

        async def ask(text: str) -> None:
            while not done:
                answers = await engine.generate(text, **options)
                found = [(one.text, round(one.score, 5)) for one in answers]
                agreeing = [number for number in (0, 1) if near(found, expected[number][text])]
                assert agreeing, text
                seen[agreeing[-1]] += 1

        asking = [asyncio.create_task(ask(text)) for text in texts[:6]]
        for bundle in (dates_fp16, dates_bundle):
            await engine.replace(bundle)
        with pytest.raises(TfexportError):
            await engine.replace(dates_bundle / "nothing")
        await asyncio.gather(engine.replace(dates_fp16), engine.replace(dates_fp16))
        await asyncio.sleep(0.05)
        done.append(True)
        await asyncio.gather(*asking)
        assert all(seen)
        assert len(engine_threads()) == 1

    def near(found: list[tuple[str, float]], others: list[tuple[str, float]]) -> bool:
        return [text for text, _ in found] == [text for text, _ in others] and [score for _, score in found] == (
            pytest.approx([score for _, score in others], abs=3e-5)
        )

    observer = Outcomes()
    serving(dates_bundle, use, observer)
    assert set(observer.counts) == {"ok"}


def test_counts_are_read_while_the_thread_works(random_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not isinstance(vars(Scheduler).get("num_rows"), property)
    assert isinstance(vars(Loop)["num_rows"], property)  # which is for the thread alone

    async def use(engine: Engine) -> None:
        asked = [engine.submit_ids([5, 6], num_beams=1 + number % 4) for number in range(40)]
        most = 0
        while not all(one.is_done for one in asked):
            most = max(most, engine.num_slots_used)
            assert engine.num_running + engine.num_waiting <= 40
            await asyncio.sleep(0)
        assert 8 <= most <= 16

    serving(random_bundle, use, slots=16)
