"""Fixtures: the app in process, behind a real server on a port of its own, or that of `--server URL` in place of both.

What they need is imported late: these tests are skipped where the packages of `tfexport[serve]` are not installed.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.serve.http.served import Serve, Served
    from tfexport.serve.config import HttpConfig


@pytest.fixture(scope="session")
def url(request: pytest.FixtureRequest) -> str | None:
    """Return where the server is that was asked for; None for one of our own."""
    return request.config.getoption("--server")


@pytest.fixture(autouse=True)
def _can_be_asked_elsewhere(request: pytest.FixtureRequest, url: str | None) -> None:
    if url and not {"serve", "address"} & set(request.fixturenames):
        pytest.skip("asks no server, or one that it makes itself")
    if url and "monkeypatch" in request.fixturenames:
        pytest.skip("plants a fault in the process of a server, which is elsewhere")


@pytest.fixture
def serve(dates_bundle: Path, url: str | None) -> Serve:
    """Return a function that serves a bundle for a minute at most."""

    from tests.serve.http.remote import elsewhere
    from tests.serve.http.served import serving

    @asynccontextmanager
    async def serve(
        http: HttpConfig | None = None, timeout: float = 60, bundle: Path = dates_bundle, **config: Any
    ) -> AsyncIterator[Served]:
        found = elsewhere(url, http, bundle, **config) if url else serving(bundle, http, **config)
        async with asyncio.timeout(timeout), found as served:
            yield served

    return serve


@pytest.fixture(scope="session")
def address(dates_bundle: Path, url: str | None) -> Iterator[str]:
    """Serve the bundle by uvicorn on loopback; return host and port."""
    if url:
        yield url.partition("://")[2]
        return
    import uvicorn

    from tests.serve.http.served import OFFERS, serving

    started, loop = threading.Event(), asyncio.new_event_loop()
    ports: list[int] = []
    leave = asyncio.Event()

    async def run() -> None:
        async with serving(dates_bundle, OFFERS) as served:
            server = uvicorn.Server(uvicorn.Config(served.app, port=0, lifespan="off", log_level="error"))
            task = asyncio.create_task(server.serve())
            while not server.started:
                await asyncio.sleep(0.01)
            ports.append(server.servers[0].sockets[0].getsockname()[1])
            started.set()
            await leave.wait()
            server.should_exit = True
            await task

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    assert started.wait(60)
    yield f"127.0.0.1:{ports[0]}"
    loop.call_soon_threadsafe(leave.set)
    thread.join()
    loop.close()
