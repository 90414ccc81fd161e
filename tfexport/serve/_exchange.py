"""Limit the size and time of HTTP bodies and responses."""

from __future__ import annotations

import asyncio
import time
import types
from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

from starlette.types import Message, Receive, Send

from tfexport.serve.config import HttpConfig
from tfexport.serve.http import RETRY_AFTER_S, RequestError

T = TypeVar("T")
MAX_UPLOADS = 16  # largest uploads that fit into memory together


class Uploads:
    """Bytes of all open requests above `max_body_bytes` of each."""

    num_bytes = 0


class Exchange:
    """`receive` and `send` of one request, within its limits.

    Slow bodies get 408, and responses that are not read end. If all large bodies together exceed the memory for them, further ones get 429.
    """

    def __init__(self, config: HttpConfig, uploads: Uploads, receive: Receive, send: Send) -> None:
        self._config, self._uploads, self._receive, self._send = config, uploads, receive, send
        self._end = time.monotonic() + config.body_timeout_s
        self._num_bytes = -config.max_body_bytes
        self._is_whole = False
        self.has_begun = self.is_late = False  # whether a response has begun, and whether it is not read

    async def receive(self) -> Message:
        """Receive a message; the body within the limits."""
        if self._is_whole:  # the next message reports that the client disconnected
            return await self._receive()
        config, uploads = self._config, self._uploads
        try:
            left_s = min(config.read_timeout_s, self._end - time.monotonic())
            message: Message = await _in_time(self._receive(), left_s)
        except TimeoutError:
            raise RequestError(408, "the body was sent too slowly", {"Connection": "close"}) from None
        before, self._num_bytes = self._num_bytes, self._num_bytes + len(message.get("body", b""))
        uploads.num_bytes += max(0, self._num_bytes) - max(0, before)
        if uploads.num_bytes > MAX_UPLOADS * config.max_upload_bytes:
            headers = {"Connection": "close", "Retry-After": str(RETRY_AFTER_S)}
            raise RequestError(429, "the server is receiving too many large requests; try again later", headers)
        self._is_whole = not message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        """Send a part of the response within the time limit."""
        self.has_begun = True
        try:
            await _in_time(self._send(message), self._config.max_send_s)
        except TimeoutError:
            self.is_late = True
            raise

    def close(self) -> None:
        """Count the body no more."""
        self._uploads.num_bytes -= max(0, self._num_bytes)


async def _in_time(call: Any, seconds: float) -> Any:
    """Await a coroutine for at most this time.

    Most calls end without waiting, and setting a timer for them would take longer than they do.
    """
    try:
        waits_for = call.send(None)
    except StopIteration as ended:
        return ended.value
    async with asyncio.timeout(seconds):
        return await _continued(call, waits_for)


@types.coroutine
def _continued(call: Coroutine[Any, Any, T], waits_for: Any) -> Generator[Any, Any, T]:
    try:
        while True:
            try:
                result = yield waits_for
            except BaseException as error:  # noqa: BLE001 - the coroutine decides, as with `await`
                waits_for = call.throw(error)
            else:
                waits_for = call.send(result)
    except StopIteration as ended:
        value: T = ended.value
        return value
