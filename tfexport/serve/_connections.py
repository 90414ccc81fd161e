"""Limit the connections of a server, and what a connection can make it hold."""

from __future__ import annotations

import asyncio
import ssl
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tfexport.errors import ConfigError

if sys.platform != "win32":
    import resource

# Connections that the system queues, and files for those that are not counted yet: being accepted, refused or in the
# TLS handshake.
BACKLOG = 2048
_OWN_FILES = 40  # of the process itself: libraries, logs, bundles while they are loaded
_REFUSAL = b"HTTP/1.1 %s\r\ncontent-length: 0\r\nretry-after: 1\r\nconnection: close\r\n\r\n"
MAX_HEAD_BYTES = 2**16  # of one request, in addition to the first read of a socket
HEAD_TIMEOUT_S = 20  # also of a TLS handshake
MAX_PIPELINED = 16  # requests of a connection that wait until the one before is answered


def reserve_files(max_connections: int) -> int:
    """Reserve files for connections, and return how many are left for others.

    Raises ConfigError if the system allows fewer.
    """
    if sys.platform == "win32":
        return BACKLOG  # sockets are no files there
    else:  # noqa: RET505 - mypy skips the branches of other systems
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = max_connections + BACKLOG + _OWN_FILES
        if soft < wanted and soft != resource.RLIM_INFINITY:
            raised = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            with suppress(ValueError, OSError):  # macOS allows fewer than it states
                resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
                soft = raised
        left = BACKLOG if soft == resource.RLIM_INFINITY else soft - _OWN_FILES - max_connections
        if left < 1:
            problem = f"the process may open {soft} files, expected {max_connections + _OWN_FILES + 1} or more"
            remedy = "lower it, or raise the limit (ulimit -n)"
            raise ConfigError(f"--max-connections {max_connections}: {problem}; {remedy}")
        return min(BACKLOG, left)


class Joined:
    """A transport that sends what is written in one turn of the event loop together.

    Head and body of a response are such parts. Each system call releases the interpreter, which another thread may then
    hold for a while.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport, self._parts = transport, list[bytes]()
        self._loop = asyncio.get_running_loop()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Send data at the end of this turn."""
        if not self._parts:
            self._loop.call_soon(self._flush)
        self._parts.append(data)

    def close(self) -> None:
        """Send what was written, and close the connection."""
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._parts:
            self._transport.write(b"".join(self._parts))
            self._parts.clear()


class LimitedProtocol(HttpToolsProtocol):
    """Limit connections and the heads of requests in uvicorn's HTTP protocol.

    Connections above the limit get 503, heads that are too long 431, and those that take too long 408.
    """

    max_connections: int

    def connection_made(self, transport: Any) -> None:
        """Refuse a connection above the limit."""
        super().connection_made(Joined(transport))  # type: ignore[arg-type]
        self._head_bytes, self._is_in_head = 0, True
        self._wait_for_head()
        if len(self.connections) > self.max_connections:
            self._refuse("503 Service Unavailable")

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the time limit."""
        self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read part of a request."""
        super().data_received(data)
        if self._is_in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse("431 Request Header Fields Too Large")
            elif self._timer.cancelled():
                self._wait_for_head()

    def on_message_begin(self) -> None:
        """Begin a head."""
        if len(self.pipeline) >= MAX_PIPELINED:
            raise ValueError("too many requests wait for an answer")
        super().on_message_begin()
        self._head_bytes, self._is_in_head = 0, True

    def on_headers_complete(self) -> None:
        """End a head."""
        self._timer.cancel()
        self._is_in_head = False
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that is not HTTP."""
        if self._is_answering():  # two responses would be mixed
            self.transport.abort()
        else:
            super().send_400_response(msg)

    def _wait_for_head(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(HEAD_TIMEOUT_S, self._head_is_late)

    def _head_is_late(self) -> None:
        if self._is_answering():  # the client may be waiting for the answer
            self._wait_for_head()
        else:
            self._refuse("408 Request Timeout")

    def _refuse(self, status: str) -> None:
        if self._is_answering():
            self.transport.abort()
        else:
            self.transport.write(_REFUSAL % status.encode())
            self.transport.close()

    def _is_answering(self) -> bool:
        cycle: Any = self.cycle  # None before the first request
        return cycle is not None and not cycle.response_complete


def limited(max_connections: int) -> type[LimitedProtocol]:
    """Return the protocol with a maximum number of connections."""
    return type("LimitedProtocol", (LimitedProtocol,), {"max_connections": max_connections})


class TlsHandshake(asyncio.Protocol):
    """Do the TLS handshake of a connection, and pass it to the HTTP protocol.

    asyncio does not limit unfinished handshakes, which could use up the files of the process. Here the oldest one is
    closed if there are too many.
    """

    def __init__(
        self,
        context: ssl.SSLContext,
        unfinished: dict[asyncio.Transport, None],
        max_unfinished: int,
        make_http: Callable[[], asyncio.Protocol],
    ) -> None:
        self._context, self._unfinished, self._max_unfinished = context, unfinished, max_unfinished
        self._make_http, self._early, self._is_lost = make_http, b"", False

    def connection_made(self, transport: Any) -> None:
        """Begin the handshake."""
        transport.pause_reading()  # until the task below reads
        self._unfinished[transport] = None
        if len(self._unfinished) > self._max_unfinished:
            oldest = next(iter(self._unfinished))
            del self._unfinished[oldest]
            oldest.abort()
        self._task = asyncio.get_running_loop().create_task(self._shake_hands(transport))

    def data_received(self, data: bytes) -> None:
        """Keep what arrives together with the end of the handshake."""
        self._early += data

    def connection_lost(self, exc: Exception | None) -> None:
        """Remember that the client has left."""
        self._is_lost = True

    async def _shake_hands(self, transport: asyncio.Transport) -> None:
        start_tls = asyncio.get_running_loop().start_tls
        try:
            secure: Any = await start_tls(
                transport, self, self._context, server_side=True, ssl_handshake_timeout=HEAD_TIMEOUT_S
            )
        except OSError:  # also if it takes too long or is not TLS
            return
        finally:
            self._unfinished.pop(transport, None)
        if self._is_lost or secure is None:  # which it is if the client left during the handshake
            return
        http = self._make_http()
        secure.set_protocol(http)
        http.connection_made(secure)
        if self._early:
            http.data_received(self._early)


def secured(protocol: type[asyncio.Protocol], context: ssl.SSLContext, max_unfinished: int) -> Any:
    """Return a factory of connections with TLS that use a protocol."""
    unfinished: dict[asyncio.Transport, None] = {}
    return lambda **arguments: TlsHandshake(context, unfinished, max_unfinished, partial(protocol, **arguments))
