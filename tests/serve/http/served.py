"""An app over the dates bundle, in process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from starlette.applications import Starlette

from tfexport.serve.config import ServingConfig
from tfexport.serve.engine import Engine
from tfexport.serve.http.app import build_app
from tfexport.serve.http.config import HttpConfig
from tfexport.serve.metrics import Metrics


@dataclass(frozen=True)
class Served:
    """An app in process.

    Attributes:
        client: that asks it, without a socket.
        engine: of the model `dates`.
        metrics: of the app.
        app: itself.
    """

    client: httpx.AsyncClient
    engine: Engine
    metrics: Metrics
    app: Starlette

    async def post(self, path: str, data: Any, **options: Any) -> httpx.Response:
        return await self.client.post(f"/v2/models/dates/{path}", json=data, **options)


@asynccontextmanager
async def serving(bundle: Path, http: HttpConfig | None = None, **config: Any) -> AsyncIterator[Served]:
    """Serve a bundle as the model `dates`."""
    metrics = Metrics()
    engine = Engine(bundle, ServingConfig(**config), observer=metrics.observer("dates"), threads=1)
    app = build_app({"dates": engine}, http, metrics)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with engine, httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield Served(client, engine, metrics, app)
