"""Clients that disconnect free their rows and change no other answer."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from typing import Any

import httpx
import pytest

from tests.serve.http.served import Exchange, Serve
from tests.serve.running import eventually
from tests.serve.served import before_steps, until
from tfexport.decode.loop import Loop
from tfexport.model.model import Model
from tfexport.serve.config import HttpConfig

STEP_S = 0.03
PATHS = ("generate", "generate_stream")


class Steps:
    """Makes the loop take slow steps one at a time, and keeps how many rows each had."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[int] = []
        before_steps(monkeypatch, self._slow)

    def _slow(self, loop: Loop) -> None:
        self.rows.append(loop.num_rows)
        time.sleep(STEP_S)

    async def reach(self, rows: int) -> None:
        await until(lambda: self.rows[-1:] == [rows])


def asked(text: str, path: str = "generate", **options: Any) -> Exchange:
    return Exchange(f"/v2/models/dates/{path}", json.dumps({"text_input": text, "parameters": options}).encode())


@pytest.mark.parametrize("path", PATHS)
async def test_a_client_that_disconnects_frees_its_rows(
    serve: Serve, model: Model, texts: list[str], monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    async with serve() as served:
        steps = Steps(monkeypatch)
        options = {"do_sample": True, "num_return_sequences": 3} if path == "generate" else {}
        gone = asked(texts[0], path, min_new_tokens=14, **options)
        stay = [asked(text, "generate", min_new_tokens=10) for text in texts[1:4]]
        tasks = [asyncio.create_task(one.run(served.app)) for one in (gone, *stay)]
        await steps.reach(6 if path == "generate" else 4)
        left_at = len(steps.rows)
        gone.leave()
        await asyncio.gather(*tasks)
        assert steps.rows[left_at + 1] == 3
        assert [json.loads(one.body)["text_output"] for one in stay] == [
            model.generate([text], min_new_tokens=10)[0].text for text in texts[1:4]
        ]
        assert served.metrics.measured().total("tfexport_requests_total", "dates") == 4
        assert served.engine.num_slots_used == served.engine.num_running == 0
        assert b"finish_reason" not in gone.body


@pytest.mark.parametrize("path", PATHS)
async def test_a_client_that_disconnects_leaves_the_queue(
    serve: Serve, texts: list[str], monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    async with serve(slots=1) as served:
        steps = Steps(monkeypatch)
        first, waits = asked(texts[0], path, min_new_tokens=14), asked(texts[1], path)
        tasks = [asyncio.create_task(one.run(served.app)) for one in (first, waits)]
        await steps.reach(1)
        assert served.engine.num_waiting == 1
        waits.leave()
        await tasks[1]
        assert (served.engine.num_waiting, waits.status) == (0, 499)
        first.leave()
        await tasks[0]
        assert (
            served.metrics.measured().total("tfexport_source_tokens_total", "dates") <= 64
        )  # the second one never joined


async def test_a_client_that_disconnects_during_the_body_is_dropped(serve: Serve) -> None:
    async with serve() as served:
        one = asked("3 May 1999")
        one.leave_half_said()
        assert (await one.run(served.app)).status == 499
        assert "tfexport_source_tokens_total" in served.metrics.measured().expose("")[0].decode()
        assert served.metrics.measured().total("tfexport_source_tokens_total", "dates") == 0
        assert served.metrics.measured().total("tfexport_requests_total", "dates") == 1


async def test_a_client_that_reads_nothing_is_dropped(
    serve: Serve, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Deaf(Exchange):
        async def _send(self, message: Any) -> None:
            await super()._send(message)
            if message["type"] == "http.response.body":
                await asyncio.Event().wait()

    async with serve(HttpConfig(max_send_s=0.1)) as served:
        steps = Steps(monkeypatch)
        deaf = Deaf("/v2/models/dates/generate_stream", asked(texts[0], min_new_tokens=14).content)
        start = time.monotonic()
        await deaf.run(served.app)
        assert time.monotonic() - start < 0.2 + 5 * STEP_S
        num_steps = len(steps.rows)
        await asyncio.sleep(5 * STEP_S)
        assert len(steps.rows) <= num_steps + 1
        assert served.engine.num_slots_used == 0


@pytest.mark.parametrize("path", PATHS)
def test_a_closed_socket_cancels(address: str, texts: list[str], monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    def cancelled() -> int:
        metrics = httpx.get(f"http://{address}/metrics").text
        name = 'tfexport_requests_total{finish_reason="",model="dates",outcome="cancelled"}'
        return next(int(float(line.split()[-1])) for line in metrics.splitlines() if line.startswith(name))

    before = cancelled()
    steps = Steps(monkeypatch)
    one = asked(texts[0], path, min_new_tokens=14)
    host, port = address.split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST {one.path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(one.content)}\r\n\r\n".encode() + one.content)
        eventually(lambda: len(steps.rows) >= 3)
    eventually(lambda: cancelled() == before + 1)
    assert len(steps.rows) < 12
