"""Many requests that are answered, cancelled, late, abandoned or refused leave no slot or thread in use."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np

from tests.serve.served import Outcomes, is_idle, serving, until
from tfexport.errors import QueueFull, ServingError, TfexportError
from tfexport.serve.engine import Engine

KINDS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"max_new_tokens": 2},
    {"num_beams": 3},
    {"do_sample": True, "num_return_sequences": 2},
    {"return_alternatives": True, "num_return_sequences": 2},
    {"repetition_penalty": 1.2},
    {"stop_strings": "-0"},
)
AT_ONCE = 64


class Caller:
    """Asks at random, and stops listening in every way there is."""

    def __init__(self, engine: Engine, texts: list[str], seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.engine, self.texts = engine, texts
        self.num_asked = self.num_refused = 0

    async def ask(self) -> None:
        rng, engine = self.rng, self.engine
        text, kind, ways = self.texts[rng.integers(len(self.texts))], KINDS[rng.integers(len(KINDS))], rng.random()
        urgency = {"priority": float(rng.normal())}
        self.num_asked += 1
        try:
            if ways < 0.2:
                await engine.generate(text, **urgency, **kind)
            elif ways < 0.4:
                await engine.generate(text, timeout_s=float(rng.exponential(0.01)) + 1e-9, **kind)
            elif ways < 0.6:
                generation = engine.submit(text, **urgency, **kind)
                await self.wait()
                generation.cancel()
                await generation
            elif ways < 0.75:
                self.num_asked -= 1  # a task that is cancelled before it has begun asks nothing
                task = asyncio.create_task(self.generate(text, kind))
                await self.wait()
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            elif ways < 0.9:
                await self.read(engine.stream(text), int(rng.integers(12)))
            elif ways < 0.97:
                await self.read(engine.stream(text, timeout_s=0.005), 99)
            else:
                engine.submit(text, num_beams=99)
        except QueueFull:
            await asyncio.sleep(0.002)
        except ServingError:
            pass
        except TfexportError:
            self.num_refused += 1

    async def generate(self, text: str, kind: dict[str, Any]) -> None:
        self.num_asked += 1
        await self.engine.generate(text, **kind)

    async def wait(self) -> None:
        if self.rng.random() < 0.7:
            await asyncio.sleep(float(self.rng.exponential(0.003)) if self.rng.random() < 0.5 else 0)

    async def read(self, stream: AsyncIterator[str], most: int) -> None:
        num_read = 0
        async for _ in stream:
            num_read += 1
            if num_read > most:
                return
            await self.wait()


async def test_nothing_is_lost(dates_bundle: Path, texts: list[str]) -> None:
    observer, threads, left = Outcomes(), set(threading.enumerate()), iter(range(2000))
    async with serving(dates_bundle, observer, slots=16, max_waiting=48, stream_buffer=4) as engine:
        caller = Caller(engine, texts, seed=7)

        async def ask_on() -> None:
            for _ in left:
                await caller.ask()

        await asyncio.gather(*(ask_on() for _ in range(AT_ONCE)))
        gc.collect()
        await until(lambda: is_idle(engine))
        assert engine.is_ready
        assert caller.num_refused == observer.counts["invalid"]
        assert caller.num_asked == sum(observer.counts.values())
    assert not [one for one in threading.enumerate() if one not in threads and one.name.startswith("tfexport")]
    assert observer.counts.keys() >= {"ok", "cancelled", "deadline", "queue_full", "invalid"}
    assert "error" not in observer.counts
