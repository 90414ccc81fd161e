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
from tfexport.serve._scheduler import Scheduler
from tfexport.serve.engine import Engine

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


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
    from tfexport.model.load import load

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


def test_replacing_leaves_a_thread_that_hangs_behind(
    dates_bundle: Path,
    model: Model,
    texts: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected = text_of(model.generate(texts[:1]))

    async def use(engine: Engine) -> None:
        hanging = Hanging(monkeypatch)
        waiting = engine.submit(texts[0])
        await until(hanging.has_begun)
        await engine.replace()
        with pytest.raises(Draining, match="the bundle was replaced"):
            await waiting
        assert "the thread of a model hangs and is left behind" in caplog.text
        assert engine.is_ready
        assert text_of(await engine.generate(texts[0])) == expected
        hanging.end()
        assert await engine.drain()

    serving(dates_bundle, use, stall_s=0.1, hang_s=0.2)


def test_an_old_thread_that_gives_signs_of_life_is_waited_for(
    dates_bundle: Path, model: Model, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it takes: no request is lost."""
    expected, num_steps = text_of(model.generate(texts[:1])), 0

    def slow(_: Loop) -> None:
        nonlocal num_steps
        num_steps += 1
        time.sleep(0.08)

    async def use(engine: Engine) -> None:
        before_steps(monkeypatch, slow)
        waiting = engine.submit(texts[0])
        await engine.replace()
        assert text_of(await waiting) == expected
        assert num_steps * 0.08 > engine.config.hang_s

    serving(dates_bundle, use, stall_s=0.6, hang_s=0.6)
