"""Server-sent events of a generation: the status is that of the first event, what goes wrong later is an event."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tfexport.errors import TfexportError
from tfexport.serve.http.errors import message_of
from tfexport.serve.http.leaving import while_heard
from tfexport.serve.protocol.asking import Asked


def event(data: dict[str, Any], kind: str = "") -> bytes:
    """Return an event, of a kind that is not the usual one if given."""
    head = f"event: {kind}\n" if kind else ""
    return f"{head}data: {json.dumps(data, ensure_ascii=False, allow_nan=False)}\n\n".encode()


class EventStream(Response):
    """Sends events as they come, and cancels the generation when its client goes away or reads nothing."""

    media_type = "text/event-stream"

    def __init__(self, asked: Asked, events: AsyncGenerator[bytes], max_send_s: float) -> None:
        """Take what is sent.

        Args:
            asked: that is cancelled.
            events: that it brings.
            max_send_s: for which an event may wait for its reader.
        """
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["Content-Length"]
        self._asked, self._events, self._max_send_s = asked, events, max_send_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all.

        Raises:
            TfexportError: there is no first event; nothing is sent.
        """
        async with while_heard(receive, self._asked), contextlib.aclosing(self._events) as events:
            first = await anext(events)
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            with contextlib.suppress(TimeoutError, OSError):  # nobody reads, or the connection is broken
                await self._send(send, first)
                try:
                    async for one in events:
                        await self._send(send, one)
                except TfexportError as error:
                    await self._send(send, event({"error": message_of(error)}, "error"))
                await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, body: bytes) -> None:
        async with asyncio.timeout(self._max_send_s):
            await send({"type": "http.response.body", "body": body, "more_body": True})
