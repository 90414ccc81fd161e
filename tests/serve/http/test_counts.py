"""What a request costs in addition to the model, in counts, which do not depend on the load of the machine."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from types import FrameType
from typing import Any

import pytest

from tests.serve.http.served import Exchange, Serve
from tests.serve.served import ENGINE_THREAD, before_steps, until
from tfexport.decode.loop import Loop
from tfexport.runtime.ort import backend
from tfexport.runtime.ort._device import OrtGraphs
from tfexport.runtime.sources import Sources
from tfexport.serve import _encoder
from tfexport.serve._connections import Joined

# Of this package and of libraries, on the event loop: 352 with those of constraints.txt.
MOST_CALLS = 420


async def test_function_calls_of_a_request(serve: Serve, texts: list[str]) -> None:
    async with serve() as served:
        body = json.dumps({"text_input": texts[0]}).encode()
        await Exchange("/v2/models/dates/generate", body).run(served.app)
        calls = 0

        def count(_: FrameType, event: str, __: Any) -> None:
            nonlocal calls
            calls += event == "call"

        asked = Exchange("/v2/models/dates/generate", body)
        sys.setprofile(count)
        try:
            await asked.run(served.app)
        finally:
            sys.setprofile(None)
        assert asked.status == 200
        assert 0 < calls <= MOST_CALLS


async def test_an_engine_wakes_the_event_loop_once_for_all_answers_of_a_step(
    serve: Serve, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve() as served:
        loop, steps = asyncio.get_running_loop(), list[int]()
        wake, step = loop.call_soon_threadsafe, Loop.step
        woken = 0

        def counted(*arguments: Any, **options: Any) -> Any:
            nonlocal woken
            woken += 1
            return wake(*arguments, **options)

        def stepped(loop: Loop, most: int | None = None) -> Any:
            updates = step(loop, most)
            steps.append(sum(update.outcome is not None for update in updates))
            return updates

        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        monkeypatch.setattr(Loop, "step", stepped)
        await asyncio.gather(*(served.engine.generate(text, max_new_tokens=6, min_new_tokens=6) for text in texts[:16]))
        assert sum(steps) == 16
        assert max(steps) > 1
        assert woken <= sum(map(bool, steps))  # those with an answer


async def test_running_requests_wait_for_no_encoder_run(
    serve: Serve, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (_encoder, backend):
        monkeypatch.setattr(module, "available_cores", lambda: 2)
    monkeypatch.setattr(_encoder, "COMPUTING", set())
    threads, run, go_on = list[str](), OrtGraphs.encode, threading.Event()

    def counted(graphs: OrtGraphs, sources: Sources) -> Any:
        threads.append(threading.current_thread().name)
        return run(graphs, sources)

    async with serve() as served:
        monkeypatch.setattr(OrtGraphs, "encode", counted)
        before_steps(monkeypatch, lambda _: go_on.wait(30))
        first = served.engine.submit(texts[0])
        await until(lambda: len(threads) == 1)
        others = [served.engine.submit(text) for text in texts[1:5]]
        go_on.set()
        await asyncio.gather(first, *others)
    assert threads[0] == ENGINE_THREAD
    assert set(threads[1:]) == {"tfexport-encoder"}


async def test_what_is_written_in_one_turn_of_the_loop_is_sent_together() -> None:
    sent: list[bytes] = []

    class Transport(asyncio.Transport):
        def write(self, data: Any) -> None:
            sent.append(bytes(data))

        def close(self) -> None:
            sent.append(b"closed")

    joined = Joined(Transport())
    joined.write(b"head ")
    joined.write(b"body")
    assert sent == []
    await asyncio.sleep(0)
    assert sent == [b"head body"]
    joined.write(b"last")
    joined.close()
    await asyncio.sleep(0)
    assert sent == [b"head body", b"last", b"closed"]
