"""What others feel of slow readers, of a flood of another model and of reloads: answers are tested, times printed.

`pytest -m slow -s tests/serve/test_neighbours.py` on a quiet machine.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from tests.serve.running import Running, eventually, running
from tfexport.bench._loops import Samples, open_loop, poisson
from tfexport.bench._server import HttpCaller, http_client
from tfexport.generation import DecodeConfig

pytestmark = pytest.mark.slow
ROUNDS, SECONDS = 5, 8.0
NUM_READERS = 50
Disturbance = Callable[[Running, str], AbstractContextManager[None]]
# Posts to a model without end, over 64 connections, whatever the answers are; it gives way to those who are measured.
FLOOD = """
import asyncio, os, sys
from tfexport.bench._server import exchange, http_client
os.nice(19)
async def post(client, path, text):
    while True:
        await exchange(client, "POST", path, {"text_input": text})
async def flood(url, path, text):
    client = http_client(url)
    await asyncio.gather(*(post(client, path, text) for _ in range(64)))
asyncio.run(flood(*sys.argv[1:]))
"""


def load_at(server: Running, rate: float, texts: list[str], seed: int, model: str = "dates") -> Samples:
    """Ask for texts at a rate for some seconds; nobody may be refused."""

    async def run() -> Samples:
        async with http_client(server.url) as client:
            ask = HttpCaller(client, model, DecodeConfig())
            return await open_loop(ask, texts, poisson(rate, SECONDS, seed))

    samples = asyncio.run(run())
    assert (samples.refused, samples.unserved) == (0, 0)
    return samples


def capacity(server: Running, texts: list[str]) -> float:
    """Return the requests a second that 32 callers get answered, each with one at a time."""

    async def call(ask: HttpCaller, end: float) -> int:
        count = 0
        while time.monotonic() < end:
            await ask.ids(texts[count % len(texts)])
            count += 1
        return count

    async def run() -> int:
        async with http_client(server.url) as client:
            ask = HttpCaller(client, "dates", DecodeConfig())
            end = time.monotonic() + SECONDS / 2
            return sum(await asyncio.gather(*(call(ask, end) for _ in range(32))))

    asyncio.run(run())  # warm
    return asyncio.run(run()) / (SECONDS / 2)


def p99_ms(samples: list[Samples]) -> float:
    return float(np.percentile(np.concatenate([one.latency_s for one in samples]), 99)) * 1000


@contextmanager
def nothing() -> Iterator[None]:
    yield


@contextmanager
def slow_readers(server: Running, text: str) -> Iterator[None]:
    """Keep streams open that are read at one byte a second."""
    host, port = server.url.removeprefix("http://").split(":")
    body = f'{{"text_input": "{text}"}}'.encode()
    head = "POST /v2/models/dates/generate_stream HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    readers = []
    for _ in range(NUM_READERS):
        one = socket.socket()
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        one.connect((host, int(port)))
        one.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        readers.append(one)
    ended = threading.Event()

    def read() -> None:
        while not ended.wait(1):
            for one in readers:
                one.setblocking(False)
                with suppress(OSError):
                    one.recv(1)

    thread = threading.Thread(target=read)
    thread.start()
    time.sleep(2)  # what they have asked for is decoded by then
    yield
    ended.set()
    thread.join()
    for one in readers:
        one.close()


@contextmanager
def flood(flooded: Running, text: str) -> Iterator[None]:
    command = [sys.executable, "-c", FLOOD, flooded.url, "/v2/models/other/generate", text]
    total = r'tfexport_requests_total\{[^}]*model="other"[^}]*\}'
    before = flooded.metric(total)
    with subprocess.Popen(command) as process:
        try:
            eventually(lambda: flooded.metric(total) > before + 100)
            yield
            assert process.poll() is None
        finally:
            process.kill()
    eventually(lambda: flooded.metric(r'tfexport_requests_waiting\{model="other"\}') == 0)


@pytest.fixture(scope="module")
def server(dates_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    bundles = [f"dates={dates_bundle}", f"other={dates_bundle}"]
    with running(tmp_path_factory.mktemp("neighbours"), *bundles, "--threads", 1) as it:
        yield it


@pytest.fixture(scope="module")
def another(dates_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A second process, which serves the other model alone."""
    with running(tmp_path_factory.mktemp("another"), f"other={dates_bundle}", "--threads", 1) as it:
        yield it


@pytest.mark.parametrize(
    ("disturbance", "disturbed"), [(slow_readers, "server"), (flood, "server"), (flood, "another")]
)
def test_others_are_answered_beside(
    server: Running, texts: list[str], disturbance: Disturbance, disturbed: str, request: pytest.FixtureRequest
) -> None:
    rate = 0.3 * capacity(server, texts)
    found: dict[bool, list[Samples]] = {False: [], True: []}
    for number in range(ROUNDS):
        for is_disturbed in (False, True) if number % 2 else (True, False):
            where = request.getfixturevalue(disturbed)
            with disturbance(where, texts[0]) if is_disturbed else nothing():
                found[is_disturbed].append(load_at(server, rate, texts, number))
            time.sleep(0.5)
    before, beside = p99_ms(found[False]), p99_ms(found[True])
    ratios = sorted(p99_ms([b]) / p99_ms([a]) for a, b in zip(found[False], found[True], strict=True))
    print(
        f"\n{request.node.name}: {rate:.0f} requests a second, p99 {before:.2f} ms alone, {beside:.2f} ms beside: "
        f"{beside / before:.2f} times; by round {', '.join(f'{ratio:.2f}' for ratio in ratios)}"
    )


def test_reloads_at_70_percent_of_the_load(dates_bundle: Path, texts: list[str], tmp_path: Path) -> None:
    """No request is refused or fails while bundles are replaced one after the other."""
    other, served = tmp_path / "other", tmp_path / "dates"
    shutil.copytree(dates_bundle, other)
    served.symlink_to(dates_bundle)
    with running(tmp_path, served, "--threads", 1) as server:
        rate = 0.7 * capacity(server, texts)
        alone = [load_at(server, rate, texts, number) for number in range(2)]
        ended = threading.Event()

        def num_reloads() -> int:
            return server.log.read_text().count("dates: reloaded in")

        def reload() -> None:
            while not ended.wait(1):
                before, link = num_reloads(), tmp_path / "link"
                link.symlink_to((other, dates_bundle)[before % 2])
                os.replace(link, served)
                server.send(signal.SIGHUP)
                eventually(lambda before=before: num_reloads() > before)  # type: ignore[misc]

        thread = threading.Thread(target=reload)
        thread.start()
        beside = [load_at(server, rate, texts, number) for number in range(2)]
        ended.set()
        thread.join()
        assert num_reloads() > 2
        print(
            f"\n{num_reloads()} reloads, {sum(one.sequences for one in beside)} requests at {rate:.0f} a second:"
            f" p99 {p99_ms(alone):.1f} ms without, {p99_ms(beside):.1f} ms beside"
        )
