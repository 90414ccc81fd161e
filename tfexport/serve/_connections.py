"""Limit the open connections of a server by what it may hold."""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tfexport.errors import ConfigError

if sys.platform != "win32":
    import resource

BACKLOG = 2048  # connections that wait to be accepted, and that asyncio may accept at once
_OWN_FILES = 40  # of the process itself: libraries, logs, bundles while they are loaded
_REFUSAL = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\nretry-after: 1\r\nconnection: close\r\n\r\n"


def reserve_files(max_connections: int) -> int:
    """Let the process open a file for each connection, and return the backlog.

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


def limited(max_connections: int) -> type[asyncio.Protocol]:
    """Return uvicorn's HTTP protocol; connections above the limit get 503."""

    class Limited(HttpToolsProtocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.connections) > max_connections:
                transport.write(_REFUSAL)
                transport.close()

    return Limited
