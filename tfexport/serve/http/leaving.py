"""Clients that go away before they are answered."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from starlette.types import Receive

from tfexport.serve.protocol.asking import Asked


@contextlib.asynccontextmanager
async def while_heard(receive: Receive, *asked: Asked) -> AsyncIterator[None]:
    """Cancel generations when the client goes away, or when this is left; the body has been read."""
    watcher = asyncio.create_task(_cancel_unheard(receive, asked))
    try:
        yield
    finally:
        watcher.cancel()
        for one in asked:
            one.cancel()


async def _cancel_unheard(receive: Receive, asked: tuple[Asked, ...]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    for one in asked:
        one.cancel()
