"""Limit bodies and responses, and require bearer tokens."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import stat
import time
import types
from collections.abc import Coroutine, Generator
from pathlib import Path
from typing import Any, TypeVar

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tfexport.errors import ConfigError
from tfexport.serve.config import HttpConfig
from tfexport.serve.http import RETRY_AFTER_S, RequestError
from tfexport.serve.routes import ui

logger = logging.getLogger(__name__)
T = TypeVar("T")
MAX_UPLOADS = 16  # largest uploads that fit into memory together
# Probes and the files of the page need no token; these paths reveal nothing about models or texts.
OPEN_PATHS = frozenset({"/livez", "/readyz", "/health", "/v2/health/live", "/v2/health/ready"}) | ui.PATHS
MIN_CHARACTERS = 16
# The syntax of RFC 6750.
_TOKEN = re.compile(rf"[A-Za-z0-9._~+/-]{{{MIN_CHARACTERS},}}=*")


class Uploads:
    """Bytes of all open requests above `max_body_bytes` of each."""

    num_bytes = 0


class Exchange:
    """`receive` and `send` of one request, within its limits.

    Slow bodies get 408, and responses that are not read end. If all large bodies together exceed the memory for them,
    further ones get 429.
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
        """Stop counting the body."""
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


class BearerTokens:
    """Require one of the bearer tokens of a file, which has one per line."""

    def __init__(self, app: ASGIApp, path: Path) -> None:
        self._app, self._path = app, path
        self.reload()

    def reload(self) -> None:
        """Read the file again; if that raises `ConfigError`, keep the old tokens."""
        path = self._path
        try:
            lines = path.read_text(encoding="ascii").split()
            mode = stat.S_IMODE(path.stat().st_mode)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not ASCII text"
            raise ConfigError(f"token file {path}: cannot be read: {reason}") from error
        wrong = [number for number, line in enumerate(lines, 1) if not _TOKEN.fullmatch(line)]
        if wrong or not lines:
            problem = f"token {wrong[0]} is not valid" if wrong else "it has no token"
            expected = f"{MIN_CHARACTERS} or more letters, digits and -._~+/ on each line"
            raise ConfigError(f"token file {path}: {problem}, expected {expected}; make one with openssl rand -hex 32")
        if mode & 0o077:
            logger.warning("token file %s can be read by others (mode %o); chmod 600 %s", path, mode, path)
        self._tokens = [line.encode() for line in lines]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the app, or answer 401 if the token is missing or unknown."""
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] != "http" or path in OPEN_PATHS or self._is_known(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        message = "the bearer token is missing or unknown; send Authorization: Bearer TOKEN"
        headers = {"WWW-Authenticate": "Bearer", "Connection": "close"}
        await JSONResponse({"error": message}, 401, headers)(scope, receive, send)

    def _is_known(self, headers: Headers) -> bool:
        scheme, _, sent = headers.get("authorization", "").partition(" ")
        # A list, so that the time does not depend on which token matches.
        matches = [hmac.compare_digest(sent.strip().encode(), token) for token in self._tokens]
        return scheme.lower() == "bearer" and any(matches)
