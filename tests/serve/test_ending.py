"""How an engine ends, and what it is given instead."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from tests.serve.served import Hanging, Outcomes, before_steps, engine_threads, is_idle, serving, text_of, until
from tfexport.decode.loop import Loop
from tfexport.errors import Draining, TfexportError
from tfexport.model.model import Model

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


async def test_who_drains_a_second_time_cuts_the_first_short(random_bundle: Path) -> None:
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


async def test_a_drain_that_is_cancelled_is_taken_up_again(random_bundle: Path) -> None:
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


async def test_replacing_leaves_a_thread_that_hangs_behind(
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


async def test_an_old_thread_that_gives_signs_of_life_is_waited_for(
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


async def test_a_thread_that_hangs_does_not_keep_an_engine_from_stopping(
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


async def test_draining_answers_what_was_accepted_and_takes_no_more(dates_bundle: Path, texts: list[str]) -> None:
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
