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
    ("text", {"text": None}, InputError, "NoneType, expected a text"),
    ("text", {"text": b"1 May"}, InputError, "bytes, expected a text"),
    ("text", {"text": ["1 May"]}, InputError, "list, expected a text"),
    ("text", {"text": 5}, InputError, "int, expected a text"),
    ("text", {"text": ""}, InputError, "^input: the text is empty"),
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
    ("text", {"prefix": None}, InputError, "prefix is NoneType, expected a text"),
    ("text", {"prefix": 0}, InputError, "prefix is int, expected a text"),
    ("text", {"stream": "no"}, InputError, "stream is .no., expected True or False"),
    ("ids", {"source": memoryview(b"\x05")}, InputError, "source is <memory"),
    ("ids", {"source": np.array([5.0])}, InputError, "source has 5.0"),
    ("ids", {"source": np.array(5)}, InputError, "source is array"),
    ("ids", {"source": np.array([[5]])}, InputError, "source is array"),
    ("ids", {"source": [[5]]}, InputError, r"source has \[5\], expected ids"),
    ("ids", {"source": [5.0]}, InputError, "source has 5.0"),
    ("ids", {"source": [True]}, InputError, "source has True"),
    ("ids", {"source": [-1]}, InputError, "source has -1"),
    ("ids", {"source": [10**30]}, InputError, "source has 1000"),
    ("ids", {"source": []}, InputError, "^decode: the source is empty"),
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
        assert await engine.generate_ids(np.array([5, 6]), prefix=iter(range(5, 7)))

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
