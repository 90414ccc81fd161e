"""What the engine costs beside the model: alone, in a burst, and on the host between two steps."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from tfexport.decode.request import check_requests
from tfexport.generation import DecodeConfig
from tfexport.runtime.session import Batch, Session
from tfexport.serve.config import ServingConfig
from tfexport.serve.engine import Engine
from tfexport.serve.job import Job
from tfexport.serve.observer import Observer
from tfexport.serve.scheduler import Scheduler
from tfexport.serve.waiting import WaitingQueue

# Rows that stream while a burst arrives.
RUNNING, BURST = 8, 64
# Together 32 rows.
KINDS: tuple[tuple[int, dict[str, Any]], ...] = (
    (8, {}),
    (8, {"do_sample": True, "seed": 1, "top_k": 20}),
    (8, {"repetition_penalty": 1.3}),
    (2, {"num_beams": 4}),
)


class Steps(Observer):
    """Notes the seconds of each step; of those taken together, each counts the mean."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self.seconds: list[float] = []

    def stepped(self, took_s: float, num_steps: int, num_rows: int) -> None:
        """Note steps."""
        self.seconds += [took_s / num_steps] * num_steps


def _exactly(tokens: int, **options: Any) -> DecodeConfig:
    return DecodeConfig(max_new_tokens=tokens, min_new_tokens=tokens, **options)


async def idle(engine: Engine, sources: Sequence[list[int]], tokens: int) -> dict[str, Any]:
    """Time one request at a time: through the engine, and by `generate`, in turns.

    Returns:
        `engine_s` and `generate_s` of each source.
    """
    config = _exactly(tokens)
    found: dict[str, list[float]] = {"engine_s": [], "generate_s": []}
    for source in (sources[0], *sources):  # the first warms up
        began = time.perf_counter()
        await engine.generate_ids(source, config=config)
        middle = time.perf_counter()
        engine.model.generate_ids([source], config=config)
        found["engine_s"].append(middle - began)
        found["generate_s"].append(time.perf_counter() - middle)
    return {name: values[1:] for name, values in found.items()}


async def burst(engine: Engine, steps: Steps, sources: Sequence[list[int]], tokens: int) -> dict[str, Any]:
    """Let 64 requests arrive at once while 8 callers stream, one text after the other.

    Returns:
        `gaps_s` between two tokens of those that stream, and `steps_s` of the engine, since the burst began.
    """
    times: list[list[float]] = []
    has_begun, is_over = asyncio.Event(), asyncio.Event()

    async def stream(number: int) -> None:
        while not is_over.is_set():
            times.append(own := [])
            async for _ in engine.stream_ids(sources[number], config=_exactly(tokens)):
                own.append(time.perf_counter())
                if len(own) == tokens // 4:
                    has_begun.set()

    async with asyncio.TaskGroup() as group:
        for number in range(RUNNING):
            group.create_task(stream(number))
        await has_begun.wait()
        began, first_step = time.perf_counter(), len(steps.seconds)
        others = [engine.submit_ids(source, config=_exactly(tokens)) for source in sources[RUNNING : RUNNING + BURST]]
        for other in others:
            await other
        is_over.set()
    gaps_s = [after - before for row in times for before, after in pairwise(row) if after >= began]
    return {"gaps_s": gaps_s, "steps_s": steps.seconds[first_step:]}


def host(engine: Engine, sources: Sequence[list[int]], tokens: int) -> dict[str, Any]:
    """Step 32 rows of four kinds, and count the CPU time of the thread that is not inside the session.

    Returns:
        `host_s` and `session_s` of each step in which all rows ran.
    """
    session = _Clocked(engine.model.session)
    waiting = WaitingQueue(1000, 1_000_000)
    scheduler = Scheduler(session, waiting, ServingConfig(slots=32, encoder_budget=1_000_000), Observer())  # type: ignore[arg-type]
    left = iter(sources)
    for count, options in KINDS:
        config = _exactly(tokens, **options)
        for _ in range(count):
            (request,) = check_requests(engine.model.session, [next(left)], config)
            waiting.put(Job(request, time.monotonic()))
    scheduler.step()
    found: dict[str, list[float]] = {"host_s": [], "session_s": []}
    while scheduler.is_busy and scheduler.num_rows == 32:
        session.seconds, began = 0.0, time.thread_time()
        scheduler.step()
        found["host_s"].append(time.thread_time() - began - session.seconds)
        found["session_s"].append(session.seconds)
    while scheduler.is_busy:
        scheduler.step()
    return {name: values[:-1] for name, values in found.items()}  # in the last one they leave


class _Clocked:
    """A session that counts the CPU seconds of the calling thread inside its batches."""

    def __init__(self, session: Session) -> None:
        self._session, self.seconds = session, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def batch(self, width: int = 1) -> _ClockedBatch:
        return _ClockedBatch(self, self._session.batch(width))


class _ClockedBatch:
    """A batch whose calls are counted."""

    def __init__(self, clock: _Clocked, batch: Batch) -> None:
        self._clock, self._batch = clock, batch

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._batch, name)
        if name not in ("add", "step", "reorder", "remove"):
            return found

        def counted(*arguments: Any) -> Any:
            began = time.thread_time()
            result = found(*arguments)
            self._clock.seconds += time.thread_time() - began
            return result

        return counted
