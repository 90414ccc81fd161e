"""Fixtures: the app in process, behind a real server on a port of its own, or that of `--server URL` in place of both.

What they need is imported late: these tests are skipped where the packages of `tfexport[serve]` are not installed.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tfexport.model.load import load
from tfexport.model.model import Model

if TYPE_CHECKING:
    from tests.serve.http.served import Served
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
def serve(dates_bundle: Path, url: str | None) -> Callable[..., None]:
    """Return a function that serves a bundle while a coroutine function uses it, for a minute at most."""

    from tests.serve.http.remote import elsewhere
    from tests.serve.http.served import serving

    def run(
        use: Callable[[Served], Awaitable[None]],
        http: HttpConfig | None = None,
        timeout: float = 60,
        bundle: Path = dates_bundle,
        **config: Any,
    ) -> None:
        async def within() -> None:
            found = elsewhere(url, http, bundle, **config) if url else serving(bundle, http, **config)
            async with asyncio.timeout(timeout), found as served:
                await use(served)

        asyncio.run(within())

    return run


@pytest.fixture(scope="session")
def model(dates_bundle: Path) -> Model:
    return load(dates_bundle, threads=1)


@pytest.fixture(scope="session")
def texts(model: Model) -> list[str]:
    assert model.tokenizer
    return [sample.text for sample in model.tokenizer.text.samples]


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
