"""The engine in process: what it answers is what `generate` says of each text alone, whatever else goes on."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.serve.served import Hanging, Outcomes, is_idle, serving, until
from tfexport.decode.loop import Loop
from tfexport.errors import (
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    Draining,
    EngineFailed,
    InputError,
    QueueFull,
)
from tfexport.model.model import Model
from tfexport.serve.engine import Engine

KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"max_new_tokens": 4},
    {"do_sample": True, "temperature": 1.3, "seed": 5, "num_return_sequences": 2},
    {"num_beams": 3, "num_return_sequences": 2},
    {"num_beams": 4, "length_penalty": 0.3},
    {"repetition_penalty": 1.4},
    {"return_alternatives": True, "num_return_sequences": 3},
    {"stop_strings": ("-0",)},
)


@pytest.mark.parametrize("seed", range(3))
def test_whoever_shares_the_batch_nothing_changes(
    dates_bundle: Path, model: Model, texts: list[str], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    asked = [(texts[rng.integers(len(texts))], KINDS[rng.integers(len(KINDS))]) for _ in range(120)]
    expected = [model.generate([text], **options) for text, options in asked]

    async def use(engine: Engine) -> None:
        async def one(text: str, options: dict[str, Any]) -> list[Any]:
            await asyncio.sleep(rng.random() / 10)
            return await engine.generate(text, priority=float(rng.integers(3)), **options)

        found = await asyncio.gather(*(one(text, options) for text, options in asked))
        for mine, theirs in zip(found, expected, strict=True):
            assert [(one.text, one.token_ids, one.finish_reason) for one in mine] == [
                (one.text, one.token_ids, one.finish_reason) for one in theirs
            ]
            assert [one.score for one in mine] == pytest.approx([one.score for one in theirs], abs=1e-4)

    observer = Outcomes()
    serving(dates_bundle, use, observer, slots=int(rng.integers(8, 33)))
    assert observer.counts == {"ok": 120}


def test_a_stream_is_the_text_in_pieces(dates_bundle: Path, model: Model, texts: list[str]) -> None:
    expected = [model.generate([text])[0] for text in texts]

    async def use(engine: Engine) -> None:
        async def pieces(text: str) -> list[str]:
            return [piece async for piece in engine.stream(text)]

        found = await asyncio.gather(*map(pieces, texts))
        assert ["".join(one) for one in found] == [one.text for one in expected]
        assert min(map(len, found)) > 3
        generation = engine.submit_ids(model.tokenizer.encode(texts[:1])[0], stream=True)  # type: ignore[union-attr]
        ids = [token async for token in generation]
        assert tuple(ids) == expected[0].token_ids == (await generation)[0].token_ids

    serving(dates_bundle, use)


def test_who_leaves_frees_its_slots_and_disturbs_nobody(dates_bundle: Path, model: Model, texts: list[str]) -> None:
    expected = {text: model.generate([text])[0].text for text in texts}

    async def use(engine: Engine) -> None:
        stay = [(text, asyncio.ensure_future(engine.generate(text))) for text in texts]
        leave = [engine.submit(text, stream=True) for text in texts]
        tasks = [asyncio.create_task(engine.generate(text, num_beams=2)) for text in texts]
        while not leave[0].found and not engine.num_slots_used:
            await asyncio.sleep(0)
        cancelled = [generation for generation in leave if not generation.is_done]
        for generation in leave:
            generation.cancel()
            generation.cancel()
        for task in tasks:
            task.cancel()
        for text, task in stay:
            assert (await task)[0].text == expected[text]
        assert len(cancelled) > len(leave) / 2
        for generation in cancelled:
            with pytest.raises(Cancelled):
                await generation
        await asyncio.gather(*tasks, return_exceptions=True)
        async for _ in engine.stream(texts[0]):
            break
        await until(lambda: is_idle(engine))

    serving(dates_bundle, use, slots=4)


def test_a_full_queue_says_when_to_come_again(dates_bundle: Path, texts: list[str]) -> None:
    async def use(engine: Engine) -> None:
        accepted, refused = [], []
        for _ in range(40):
            try:
                accepted.append(engine.submit(texts[0]))
            except QueueFull as error:
                refused.append(error)
        assert len(accepted) >= 5
        assert len(refused) >= 20
        assert all(1 <= error.retry_after_s <= 60 for error in refused)
        await asyncio.gather(*accepted)
        await engine.generate(texts[0])

    observer = Outcomes()
    serving(dates_bundle, use, observer, max_waiting=5, slots=1)
    assert sum(observer.counts.values()) == 41
    assert set(observer.counts) == {"ok", "queue_full"}


def test_the_older_and_the_more_urgent_go_first(
    dates_bundle: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[int] = []
    hanging = Hanging(monkeypatch)

    async def use(engine: Engine) -> None:
        async def one(number: int, asked: Awaitable[object]) -> None:
            await asked
            done.append(number)

        asked = [engine.submit(texts[0], priority=100.0 if number == 9 else 0.0) for number in range(10)]
        hanging.end()
        await asyncio.gather(*(one(*each) for each in enumerate(asked)))

    serving(dates_bundle, use, slots=1)
    assert done.index(9) <= 1
    rest = [number for number in done if number != 9]
    assert rest == sorted(rest)


def test_a_reader_that_is_too_slow_is_cancelled(dates_bundle: Path, texts: list[str]) -> None:
    async def use(engine: Engine) -> None:
        generation = engine.submit(texts[0], stream=True)
        await until(lambda: generation.is_done)
        with pytest.raises(Cancelled, match="too slowly"):
            async for _ in generation:
                pass
        assert len(await engine.generate(texts[0])) == 1

    observer = Outcomes()
    serving(dates_bundle, use, observer, stream_buffer=2)
    assert observer.counts == {"slow_reader": 1, "ok": 1}


def test_a_thread_that_hangs_does_not_keep_an_engine_from_stopping(
    dates_bundle: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()

    def hanging(*_: object) -> list[Any]:
        go_on.wait(30)
        return []

    async def use(engine: Engine) -> None:
        monkeypatch.setattr(Loop, "step", hanging)
        waiting = engine.submit(texts[0])
        assert not await engine.drain(0.1)
        with pytest.raises(Draining):
            await waiting
        go_on.set()

    serving(dates_bundle, use, stall_s=0.2)


def test_draining_answers_what_was_accepted_and_takes_no_more(dates_bundle: Path, texts: list[str]) -> None:
    async def use(engine: Engine) -> None:
        waiting = [engine.submit(text) for text in texts]
        draining = asyncio.create_task(engine.drain(30))
        await asyncio.sleep(0)
        assert not engine.is_ready
        with pytest.raises(Draining):
            engine.submit(texts[0])
        assert all([await generation for generation in waiting])
        assert await draining
        assert engine.state == "stopped"

    serving(dates_bundle, use, slots=1)


def test_an_engine_that_drains_takes_no_other_bundle(dates_bundle: Path) -> None:
    async def use(engine: Engine) -> None:
        replacing = asyncio.create_task(engine.replace())
        await asyncio.sleep(0)
        assert await engine.drain()
        with pytest.raises(Draining, match="no other bundle"):
            await replacing
        assert engine.state == "stopped"
        assert await engine.drain()

    serving(dates_bundle, use)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"num_beams": 9}, InputError, "num_beams is 9, the limit is 8"),
        ({"do_sample": True, "num_return_sequences": 40}, InputError, "takes 40 slots of 32"),
        ({"num_beams": 2, "stream": True}, InputError, "num_beams is 2, but a stream"),
        ({"max_new_tokens": 0}, ConfigError, "max_new_tokens is 0"),
        ({"nonsense": 1}, ConfigError, "nonsense"),
        ({"max_new_tokens": 10**6}, InputError, "lower max_new_tokens"),
        (
            {"replace_unknowns": True},
            ConfigError,
            "replace_unknowns: this bundle was exported without alignment; export",
        ),
        ({"replace_unknowns": True, "stream": True}, InputError, "stream: replace_unknowns is true, but the alignment"),
    ],
)
def test_what_cannot_be_served_is_refused_at_once(
    dates_bundle: Path, texts: list[str], options: dict[str, Any], error: type[Exception], says: str
) -> None:
    async def use(engine: Engine) -> None:
        with pytest.raises(error, match=says):
            engine.submit(texts[0], **options)

    observer = Outcomes()
    serving(dates_bundle, use, observer)
    assert observer.counts == {"invalid": 1}


def test_an_engine_that_was_not_started_says_so(dates_bundle: Path) -> None:
    with pytest.raises(EngineFailed, match="not started"):
        Engine(dates_bundle).submit("x")


def test_a_clock_that_jumps_changes_nothing(
    dates_bundle: Path, model: Model, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By sixty years and back whenever somebody looks."""
    jumps = itertools.cycle([0.0, 2e9])
    monkeypatch.setattr(time, "time", lambda: next(jumps))

    async def use(engine: Engine) -> None:
        found = await asyncio.gather(*(engine.generate(text, timeout_s=30, max_time=30.0) for text in texts))
        assert [one.text for (one,) in found] == [one.text for one in model.generate(texts)]
        with pytest.raises(DeadlineExceeded):
            await engine.generate(texts[0], timeout_s=1e-6)

    serving(dates_bundle, use)
