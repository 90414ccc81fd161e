"""Deadlines while the engine's thread hangs: who waits is told in time, and the rows are free when it goes on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.serve.served import Hanging, Outcomes, is_idle, serving, text_of, until
from tfexport.errors import DeadlineExceeded
from tfexport.model.model import Model
from tfexport.serve.engine import Engine

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


def test_who_waits_is_told_while_the_thread_hangs(
    dates_bundle: Path, model: Model, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = text_of(model.generate(texts[:1]))
    observer = Outcomes()

    async def use(engine: Engine) -> None:
        hanging = Hanging(monkeypatch)
        decoded = engine.submit(texts[0], timeout_s=0.4)
        streamed = engine.submit(texts[1], timeout_s=0.4, stream=True)
        await until(hanging.has_begun)
        queued = engine.submit(texts[2], timeout_s=0.1)
        async with asyncio.timeout(20):
            with pytest.raises(DeadlineExceeded, match=r"the 0.1 s of the request were over before it began"):
                await queued
            with pytest.raises(DeadlineExceeded, match=r"the 0.4 s of the request were over"):
                await decoded
            with pytest.raises(DeadlineExceeded, match=r"the 0.4 s of the request were over"):
                _ = [piece async for piece in streamed]
        assert observer.counts == {"deadline": 3}
        hanging.end()
        await until(lambda: is_idle(engine))
        assert text_of(await engine.generate(texts[0], timeout_s=60)) == expected

    serving(dates_bundle, use, observer, slots=1)
    assert observer.counts == {"deadline": 3, "ok": 1}


def test_the_alarm_of_a_request_goes_with_it(random_bundle: Path) -> None:
    async def use(engine: Engine) -> None:
        def alarms() -> int:
            return sum(not alarm.cancelled() for alarm in asyncio.get_running_loop()._scheduled)  # type: ignore[attr-defined]

        before = alarms()
        asked = [engine.submit_ids([5, 6], timeout_s=30) for _ in range(3)]
        assert alarms() == before + 3
        asked[2].cancel()
        await asyncio.gather(*asked[:2])
        assert alarms() == before

    serving(random_bundle, use)
