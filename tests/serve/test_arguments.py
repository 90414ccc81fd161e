"""What a caller may give or do wrongly: it is refused in one line, and nothing else changes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.serve.served import Outcomes, is_idle, serving
from tfexport.errors import ConfigError, Draining, EngineFailed, InputError, TfexportError
from tfexport.serve.engine import Engine

pytestmark = pytest.mark.usefixtures("no_thread_is_left")

NONSENSE: tuple[tuple[str, dict[str, Any], type[TfexportError], str], ...] = (
    ("text", {"text": b"1 May"}, InputError, "bytes, expected a text"),
    ("text", {"text": ""}, InputError, "^input: the text is empty"),
    ("text", {"prefix": 5}, InputError, "prefix is int, expected a text"),
    ("text", {"priority": float("nan")}, InputError, "priority is nan, expected seconds"),
    ("text", {"priority": 1e300}, InputError, r"priority is 1e\+300"),
    ("text", {"priority": "high"}, InputError, "priority is 'high'"),
    ("text", {"priority": True}, InputError, "priority is True"),
    ("text", {"timeout_s": 0}, InputError, "timeout_s is 0, expected"),
    ("text", {"timeout_s": float("nan")}, InputError, "timeout_s is nan"),
    ("text", {"timeout_s": 10**400}, InputError, "timeout_s is 1000"),
    ("text", {"timeout_s": "5"}, InputError, "timeout_s is '5'"),
    ("text", {"config": 5}, ConfigError, "config is 5, expected a DecodeConfig"),
    ("text", {"num_beams": 9}, InputError, "num_beams is 9, the limit is 8"),
    ("text", {"do_sample": True, "num_return_sequences": 40}, InputError, "needs 40 slots, the engine has 32"),
    ("text", {"num_beams": 2, "stream": True}, InputError, "num_beams is 2, but a stream"),
    ("text", {"max_new_tokens": 0}, ConfigError, "max_new_tokens is 0"),
    ("text", {"nonsense": 1}, ConfigError, "nonsense"),
    ("text", {"max_new_tokens": 10**6}, InputError, "lower max_new_tokens"),
    ("text", {"replace_unknowns": True}, ConfigError, "replace_unknowns: this bundle was exported without alignment"),
    ("text", {"replace_unknowns": True, "stream": True}, InputError, "stream: replace_unknowns is true, but the"),
    ("ids", {"source": "567"}, InputError, "source is '567', expected a list"),
    ("text", {"stream": "no"}, InputError, "stream is .no., expected True or False"),
    ("ids", {"source": [-1]}, InputError, "source has -1"),
    ("ids", {"source": []}, InputError, "^decode: the source is empty"),
    ("ids", {"prefix": "20"}, InputError, "prefix is '20'"),
    ("ids", {"prefix": [None]}, InputError, "prefix has None"),
)


async def test_nonsense_is_refused_in_one_line_and_counted_as_invalid(dates_bundle: Path, texts: list[str]) -> None:
    observer = Outcomes()
    async with serving(dates_bundle, observer) as engine:
        for kind, given, error, says in NONSENSE:
            with pytest.raises(error, match=says) as refused:
                if kind == "text":
                    engine.submit(**({"text": texts[0]} | given))
                else:
                    engine.submit_ids(**({"source": [5, 6]} | given))
            assert "\n" not in str(refused.value)
        assert is_idle(engine)
        assert await engine.generate_ids(np.array([5, 6]), prefix=iter(range(5, 7)))
    assert observer.counts == {"invalid": len(NONSENSE), "ok": 1}


async def test_an_engine_is_asked_on_its_own_event_loop(dates_bundle: Path, texts: list[str]) -> None:
    async with serving(dates_bundle) as engine:

        async def ask() -> None:
            engine.submit(texts[0])

        async def replace() -> None:
            await engine.replace()

        for asked in (lambda: asyncio.run(ask()), lambda: engine.submit(texts[0]), lambda: asyncio.run(replace())):
            with pytest.raises(EngineFailed, match="started on another event loop"):
                await asyncio.to_thread(asked)
        assert is_idle(engine)


async def test_an_engine_is_started_once_and_not_after_it_was_drained(dates_bundle: Path) -> None:
    async with serving(dates_bundle) as engine:
        with pytest.raises(EngineFailed, match="started only once"):
            await engine.start()
    engine = Engine(dates_bundle, threads=1)
    starting = asyncio.create_task(engine.start())
    await asyncio.sleep(0)
    assert await engine.drain()
    with pytest.raises(Draining, match="before it was ready"):
        await starting
    assert engine.state == "stopped"
    with pytest.raises(EngineFailed, match="started only once"):
        await engine.start()


async def test_an_engine_that_was_not_started_does_nothing(dates_bundle: Path) -> None:
    engine = Engine(dates_bundle)
    with pytest.raises(EngineFailed, match="not started"):
        await engine.replace()
    with pytest.raises(EngineFailed, match="not started"):
        engine.submit("x")
