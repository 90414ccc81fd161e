"""Helpers for tests of an engine: start one, count how requests end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tfexport.decode.loop import Loop
from tfexport.serve.config import ServingConfig
from tfexport.serve.engine import Engine
from tfexport.serve.observer import Observer, Outcome

ENGINE_THREAD = "tfexport-engine"
# Of engines that other tests of this process have left to the collector.
BEFORE: set[threading.Thread] = set()


def before_steps(monkeypatch: pytest.MonkeyPatch, do: Callable[[Loop], object]) -> None:
    """Do something before each step of an engine's thread, and take steps one at a time."""
    step = Loop.step

    def stepped(loop: Loop, most: int | None = None) -> Any:
        if threading.current_thread().name != ENGINE_THREAD:
            return step(loop, most)
        do(loop)
        return step(loop, 1)

    monkeypatch.setattr(Loop, "step", stepped)


class Hanging:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._begun, self._go_on = threading.Event(), threading.Event()
        before_steps(monkeypatch, lambda _: self._hang())

    def _hang(self) -> None:
        if not self._begun.is_set():
            self._begun.set()
            self._go_on.wait(60)

    def has_begun(self) -> bool:
        return self._begun.is_set()

    def end(self) -> None:
        self._go_on.set()


class Outcomes(Observer):
    def __init__(self) -> None:
        self.counts: dict[Outcome, int] = {}

    def ended(self, outcome: Outcome, reason: str, took_s: float, num_tokens: int, per_token_s: float | None) -> None:
        self.counts[outcome] = self.counts.get(outcome, 0) + 1


@asynccontextmanager
async def serving(
    bundle: Path,
    observer: Observer | None = None,
    *,
    within_s: float = 60,
    options: dict[str, Any] | None = None,
    **config: Any,
) -> AsyncIterator[Engine]:
    engine = Engine(bundle, ServingConfig(**config), observer=observer, **{"threads": 1} | (options or {}))
    async with asyncio.timeout(within_s), engine:
        yield engine


async def until(is_so: Callable[[], bool], within_s: float = 5) -> None:
    async with asyncio.timeout(within_s):
        while not is_so():
            await asyncio.sleep(0.001)


def is_idle(engine: Engine) -> bool:
    return (engine.num_running, engine.num_waiting, engine.num_slots_used) == (0, 0, 0)


def text_of(found: list[Any]) -> list[str]:
    return [one.text for one in found]


def engine_threads() -> list[threading.Thread]:
    """Return the threads of the engines of this test."""
    return [thread for thread in threading.enumerate() if thread.name == ENGINE_THREAD and thread not in BEFORE]
