"""One connection of uvicorn's HTTP/1.1, with bounds on the time that a client takes to send and to read."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

# Seconds for the whole head of a request, and between two parts of its body.
READ_TIMEOUT_S = 10.0
# Seconds for the whole body.
BODY_TIMEOUT_S = 60.0
# Seconds without a request after which a connection is closed.
KEEP_ALIVE_S = 75
# Seconds that an answer may wait for a client that does not read it.
SEND_TIMEOUT_S = 30.0
_TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
_TOO_MANY = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class Connection(H11Protocol):
    """Closes who sends or reads too slowly, and who comes when there are too many; see `H11Protocol`.

    uvicorn itself bounds only the time between two requests.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # uvicorn would read a whole request before it refuses it
        self._max_connections, self.limit_concurrency = self.limit_concurrency, None
        self._reading: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None
        self._head_end = self._body_end = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin, or close at once where there are too many."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=1)  # whatever waits pauses writing; TLS takes no 0
        if self._max_connections and len(self.connections) > self._max_connections:
            transport.write(_TOO_MANY)
            transport.close()
            return
        self._head_end = self.loop.time() + READ_TIMEOUT_S
        self._watch_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        _cancel(self._reading)
        _cancel(self._writing)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take what the client has sent."""
        if not self._head_end:
            self._head_end = self.loop.time() + READ_TIMEOUT_S
        super().data_received(data)
        self._watch_reading()

    def on_response_complete(self) -> None:
        """Wait for the next request, which may have begun already."""
        super().on_response_complete()
        self._watch_reading()

    def pause_writing(self) -> None:
        """Give the client time to read what waits for it."""
        super().pause_writing()
        self._writing = self.loop.call_later(SEND_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        """Go on: all was read, or is the kernel's."""
        _cancel(self._writing)
        super().resume_writing()

    def _watch_reading(self) -> None:
        """Set the time until which the client has to send more, where it has begun a request."""
        _cancel(self._reading)
        self._reading = None
        now, state = self.loop.time(), self.conn.their_state
        if state is h11.SEND_BODY:
            self._body_end = self._body_end or now + BODY_TIMEOUT_S
            until = min(self._body_end, now + READ_TIMEOUT_S)
        else:
            self._body_end = 0.0
            is_head = state is h11.IDLE and self.timeout_keep_alive_task is None
            self._head_end = (self._head_end or now + READ_TIMEOUT_S) if is_head else 0.0
            until = self._head_end
        if until:
            self._reading = self.loop.call_at(until, self._give_up_reading)

    def _give_up_reading(self) -> None:
        if self.transport.is_closing():
            return
        if self.flow.read_paused:  # it is us who are slow
            self._watch_reading()
            return
        if self.conn.their_state is h11.IDLE or not self.cycle.response_started:
            self.transport.write(_TOO_SLOW)
        self.transport.close()


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer:
        timer.cancel()
