"""Limit the open connections of a server by what it may hold."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tfexport._io.process import resource
from tfexport.errors import ConfigError

BACKLOG = 2048  # connections that wait to be accepted, and that asyncio may accept at once
_OWN_FILES = 40  # of the process itself: libraries, logs, bundles while they are loaded
_REFUSAL = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\nretry-after: 1\r\nconnection: close\r\n\r\n"


def reserve_files(max_connections: int) -> int:
    """Let the process open a file for each connection, and return the backlog.

    Raises ConfigError if the system allows fewer.
    """
    if resource is None:  # as on Windows
        return BACKLOG
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max_connections + BACKLOG + _OWN_FILES
    if soft < wanted and soft != resource.RLIM_INFINITY:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY:
        return BACKLOG
    left: int = soft - _OWN_FILES - max_connections
    if left < 1:
        problem = f"the process may open {soft} files, expected {max_connections + _OWN_FILES + 1} or more"
        raise ConfigError(f"--max-connections {max_connections}: {problem}; lower it, or raise the limit (ulimit -n)")
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
