"""Fixtures: the app in process, on a port, or at `--server URL`.

They import late, so that these tests are skipped without the packages of `tfexport[serve]`.
"""

from __future__ import annotations

import asyncio
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
        pytest.skip("needs a server of its own")
    if url and "monkeypatch" in request.fixturenames:
        pytest.skip("changes the process of the server")


@pytest.fixture
def serve(dates_bundle: Path, url: str | None) -> Serve:
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
    if url:
        yield url.partition("://")[2]
        return
    from tests.serve.http.served import OFFERS, on_port

    with on_port(dates_bundle, "dates", http=OFFERS) as found:
        yield found
