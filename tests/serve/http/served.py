"""Serve the dates bundle in process or on a port."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx
import uvicorn
from starlette.applications import Starlette

from tfexport.serve.app import build_app
from tfexport.serve.config import HttpConfig, ServingConfig
from tfexport.serve.engine import Engine
from tfexport.serve.metrics import Metrics

# What a server that is asked over the network offers besides the usual.
OFFERS = HttpConfig(completions=True, translate=True)


class Asking:
    client: httpx.AsyncClient

    async def post(self, path: str, data: Any, **options: Any) -> httpx.Response:
        return await self.client.post(f"/v2/models/dates/{path}", json=data, **options)


@dataclass(frozen=True)
class Served(Asking):
    """An app in process; `client` asks it without a socket."""

    client: httpx.AsyncClient
    engine: Engine
    metrics: Metrics
    app: Starlette


@asynccontextmanager
async def serving(bundle: Path, http: HttpConfig | None = None, **config: Any) -> AsyncIterator[Served]:
    """Serve a bundle as the model `dates`."""
    metrics = Metrics()
    engine = Engine(bundle, ServingConfig(**config), observer=metrics.observer("dates"), threads=1)
    app = build_app({"dates": engine}, http, metrics)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with engine, httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield Served(client, engine, metrics, app)


@contextmanager
def on_port(bundle: Path, *names: str, http: HttpConfig | None = None, **config: Any) -> Iterator[str]:
    """Serve a bundle under some names by uvicorn in a thread; yield host and port."""
    metrics = Metrics()
    engines = {
        name: Engine(bundle, ServingConfig(**config), observer=metrics.observer(name), threads=1) for name in names
    }
    server = uvicorn.Server(
        uvicorn.Config(
            build_app(engines, http, metrics), port=0, lifespan="off", log_level="error", timeout_graceful_shutdown=1
        )
    )

    async def serve() -> None:
        for engine in engines.values():
            await engine.start()
        await server.serve()
        for engine in engines.values():
            await engine.drain(0)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            thread.join(0.02)
        yield f"127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


# The fixture `serve`.
Serve = Callable[..., AbstractAsyncContextManager[Served]]


@dataclass
class Exchange:
    """One request to the app itself, by a client that may go away; `status` is 0 before the answer."""

    path: str
    content: bytes
    status: int = 0
    body: bytes = b""

    def __post_init__(self) -> None:
        self._leave = asyncio.Event()
        self._unread = [{"type": "http.request", "body": self.content, "more_body": False}]

    def leave(self) -> None:
        self._leave.set()

    def leave_half_said(self) -> None:
        half = self.content[: len(self.content) // 2]
        self._unread = [{"type": "http.request", "body": half, "more_body": True}]
        self._leave.set()

    async def run(self, app: Starlette) -> Self:
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(self.content)).encode())]
        scope = {"type": "http", "http_version": "1.1", "method": "POST", "path": self.path, "query_string": b""}
        await app(scope | {"headers": headers}, self._receive, self._send)
        return self

    async def _receive(self) -> Any:
        if self._unread:
            return self._unread.pop()
        await self._leave.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.status = message.get("status", self.status)
        self.body += message.get("body", b"")
