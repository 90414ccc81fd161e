"""How a caller may wait for an answer or read it, and stop waiting: its slots are free then."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest

from tests.serve.served import Outcomes, is_idle, serving, text_of, until
from tfexport.errors import Cancelled
from tfexport.model.model import Model
from tfexport.serve.engine import Engine

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


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
        await until(lambda: generation.is_done)
        assert len([token async for token in generation]) == 43

    serving(random_bundle, use, stream_buffer=4)


def test_whoever_holds_a_generation_holds_its_engine(random_bundle: Path) -> None:
    async def use() -> None:
        generation = (await Engine(random_bundle, threads=1).start()).submit_ids([5, 6])
        gc.collect()
        async with asyncio.timeout(30):
            assert await generation

    asyncio.run(use())
