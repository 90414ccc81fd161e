"""Wait for answers, read streams, cancel, drain and replace."""

from __future__ import annotations

import asyncio
import gc
import itertools
import time
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any, cast

import pytest

from tests.serve.served import Hanging, Outcomes, before_steps, engine_threads, is_idle, serving, text_of, until
from tfexport.decode.loop import Loop
from tfexport.errors import Cancelled, DeadlineExceeded, Draining, TfexportError
from tfexport.model.model import Model
from tfexport.serve.engine import Engine

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


async def test_a_generation_is_awaited_and_read_in_any_way(dates_bundle: Path, model: Model, texts: list[str]) -> None:
    expected = text_of(model.generate([texts[0]]))
    observer = Outcomes()
    async with serving(dates_bundle, observer) as engine:
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
    assert observer.counts == {"ok": 2}


async def test_cancelling_a_task_cancels_its_request(dates_bundle: Path, texts: list[str]) -> None:
    async with serving(dates_bundle) as engine:

        async def read() -> None:
            async for _ in engine.stream(texts[0]):
                await asyncio.sleep(0)

        for ticks in range(12):
            tasks = [asyncio.create_task(read()), asyncio.create_task(engine.generate(texts[0], num_beams=4))]
            for _ in range(ticks):
                await asyncio.sleep(0 if ticks < 6 else 0.0005)
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(end, asyncio.CancelledError | list | None) for end in ends)
            await until(lambda: is_idle(engine))
        await engine.generate(texts[0])


async def test_a_reader_that_stops_frees_its_slot(random_bundle: Path) -> None:
    observer = Outcomes()
    async with serving(random_bundle, observer) as engine:

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
        task = asyncio.create_task(engine.generate_ids([5, 6]))
        await until(lambda: engine.num_slots_used > 0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: is_idle(engine))
    assert observer.counts == {"cancelled": 6}


async def test_a_long_prefix_does_not_count_as_a_slow_reader(random_bundle: Path) -> None:
    async with serving(random_bundle, stream_buffer=4) as engine:
        generation = engine.submit_ids([5, 6], prefix=[7] * 40, stream=True, max_new_tokens=3)
        await until(lambda: generation.is_done)
        assert len([token async for token in generation]) == 43


async def test_a_referenced_generation_is_completed(random_bundle: Path) -> None:
    generation = (await Engine(random_bundle, threads=1).start()).submit_ids([5, 6])
    gc.collect()
    async with asyncio.timeout(30):
        assert await generation


async def test_older_and_more_urgent_requests_come_first(
    dates_bundle: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[int] = []
    hanging = Hanging(monkeypatch)
    async with serving(dates_bundle, slots=1) as engine:

        async def one(number: int, asked: Awaitable[object]) -> None:
            await asked
            done.append(number)

        asked = [engine.submit(texts[0], priority=100.0 if number == 9 else 0.0) for number in range(10)]
        hanging.end()
        await asyncio.gather(*(one(*each) for each in enumerate(asked)))
    assert done.index(9) <= 1
    rest = [number for number in done if number != 9]
    assert rest == sorted(rest)


async def test_a_reader_that_is_too_slow_is_cancelled(dates_bundle: Path, texts: list[str]) -> None:
    observer = Outcomes()
    async with serving(dates_bundle, observer, stream_buffer=2) as engine:
        generation = engine.submit(texts[0], stream=True)
        await until(lambda: generation.is_done)
        with pytest.raises(Cancelled, match="too slowly"):
            async for _ in generation:
                pass
        assert len(await engine.generate(texts[0])) == 1
    assert observer.counts == {"slow_reader": 1, "ok": 1}


async def test_a_clock_that_jumps_changes_nothing(
    dates_bundle: Path, model: Model, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    jumps = itertools.cycle([0.0, 2e9])
    monkeypatch.setattr(time, "time", lambda: next(jumps))
    async with serving(dates_bundle) as engine:
        found = await asyncio.gather(*(engine.generate(text, timeout_s=30, max_time=30.0) for text in texts))
        assert [one.text for (one,) in found] == [one.text for one in model.generate(texts)]
        with pytest.raises(DeadlineExceeded):
            await engine.generate(texts[0], timeout_s=1e-6)


async def test_waiting_requests_end_while_the_thread_hangs(
    dates_bundle: Path, model: Model, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = text_of(model.generate(texts[:1]))
    observer = Outcomes()
    async with serving(dates_bundle, observer, slots=1) as engine:
        hanging = Hanging(monkeypatch)
        decoded = engine.submit(texts[0], timeout_s=0.4)
        streamed = engine.submit(texts[1], timeout_s=0.4, stream=True)
        await until(hanging.has_begun)
        queued = engine.submit(texts[2], timeout_s=0.1)
        async with asyncio.timeout(20):
            with pytest.raises(DeadlineExceeded, match=r"limit of 0.1 s was exceeded before decoding began"):
                await queued
            with pytest.raises(DeadlineExceeded, match=r"limit of 0.4 s was exceeded"):
                await decoded
            with pytest.raises(DeadlineExceeded, match=r"limit of 0.4 s was exceeded"):
                _ = [piece async for piece in streamed]
        assert observer.counts == {"deadline": 3}
        hanging.end()
        await until(lambda: is_idle(engine))
        assert text_of(await engine.generate(texts[0], timeout_s=60)) == expected
    assert observer.counts == {"deadline": 3, "ok": 1}


async def test_a_second_drain_shortens_the_first(random_bundle: Path) -> None:
    observer = Outcomes()
    async with serving(random_bundle, observer, slots=1) as engine:
        asked = [engine.submit_ids([5, 6]) for _ in range(200)]
        first = asyncio.create_task(engine.drain())
        await asyncio.sleep(0.01)
        assert not await engine.drain(0)
        assert not await first
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert {type(one) for one in found} <= {Draining, list}
        assert any(isinstance(one, Draining) for one in found)
        assert is_idle(engine)
    assert sum(observer.counts.values()) == 200


async def test_a_cancelled_drain_can_be_repeated(random_bundle: Path) -> None:
    async with serving(random_bundle, slots=2) as engine:
        asked = [engine.submit_ids([5, 6]) for _ in range(20)]
        first = asyncio.create_task(engine.drain())
        await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert engine.state == "draining"
        assert await engine.drain()
        assert all([await one for one in asked])


async def test_replacing_loses_no_request_and_leaves_one_thread(
    dates_bundle: Path, model: Model, texts: list[str]
) -> None:
    expected, observer = {text: text_of(model.generate([text])) for text in texts[:6]}, Outcomes()
    async with serving(dates_bundle, observer) as engine:
        done: list[bool] = []

        async def ask(text: str) -> None:
            while not done:
                assert text_of(await engine.generate(text)) == expected[text]

        asking = [asyncio.create_task(ask(text)) for text in expected]
        with pytest.raises(TfexportError):
            await engine.replace(dates_bundle / "nothing")
        await asyncio.gather(engine.replace(), engine.replace(dates_bundle))
        done.append(True)
        await asyncio.gather(*asking)
        assert len(engine_threads()) == 1
    assert set(observer.counts) == {"ok"}


async def test_replacing_abandons_a_hung_thread(
    dates_bundle: Path,
    model: Model,
    texts: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected = text_of(model.generate(texts[:1]))
    async with serving(dates_bundle, stall_s=0.1, hang_s=0.2) as engine:
        hanging = Hanging(monkeypatch)
        waiting = engine.submit(texts[0])
        await until(hanging.has_begun)
        await engine.replace()
        with pytest.raises(Draining, match="the bundle was replaced"):
            await waiting
        assert "a model's thread hangs and was abandoned" in caplog.text
        assert engine.is_ready
        assert text_of(await engine.generate(texts[0])) == expected
        hanging.end()
        assert await engine.drain()


async def test_replacing_waits_for_a_thread_that_makes_progress(
    dates_bundle: Path, model: Model, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, num_steps = text_of(model.generate(texts[:1])), 0

    def slow(_: Loop) -> None:
        nonlocal num_steps
        num_steps += 1
        time.sleep(0.08)

    async with serving(dates_bundle, stall_s=0.6, hang_s=0.6) as engine:
        before_steps(monkeypatch, slow)
        waiting = engine.submit(texts[0])
        await engine.replace()
        assert text_of(await waiting) == expected
        assert num_steps * 0.08 > engine.config.hang_s


async def test_a_hung_thread_does_not_prevent_stopping(
    dates_bundle: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(dates_bundle, stall_s=0.2) as engine:
        hanging = Hanging(monkeypatch)
        waiting = engine.submit(texts[0])
        await until(hanging.has_begun)
        assert not await engine.drain(0.1)
        with pytest.raises(Draining):
            await waiting
        hanging.end()


async def test_draining_answers_accepted_requests_and_refuses_new_ones(dates_bundle: Path, texts: list[str]) -> None:
    async with serving(dates_bundle, slots=1) as engine:
        waiting = [engine.submit(text) for text in texts]
        draining = asyncio.create_task(engine.drain(30))
        await asyncio.sleep(0)
        assert not engine.is_ready
        with pytest.raises(Draining):
            engine.submit(texts[0])
        assert all([await generation for generation in waiting])
        assert await draining
        assert engine.state == "stopped"


async def test_an_engine_that_drains_takes_no_other_bundle(dates_bundle: Path) -> None:
    async with serving(dates_bundle) as engine:
        replacing = asyncio.create_task(engine.replace())
        await asyncio.sleep(0)
        assert await engine.drain()
        with pytest.raises(Draining, match="loads no other bundle"):
            await replacing
        assert engine.state == "stopped"
        assert await engine.drain()
