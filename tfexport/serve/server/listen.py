"""The address that is listened on, and uvicorn's settings behind it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from tfexport.errors import ConfigError
from tfexport.serve.server.config import ServerConfig
from tfexport.serve.server.connection import KEEP_ALIVE_S, READ_TIMEOUT_S, Connection

BACKLOG = 2048
# Seconds in which clients take the last answers.
GRACE_S = 2
# Bytes that the kernel keeps of an answer that nobody reads; left alone it keeps megabytes a connection.
SEND_BUFFER_BYTES = 128 * 1024


class Uvicorn(uvicorn.Server):
    """uvicorn's server without its signals: who runs it says when to stop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


class EventLoop(asyncio.SelectorEventLoop):
    """The event loop, in which clients have little time for what TLS says before and after requests."""

    async def create_server(self, *args: Any, **kwargs: Any) -> asyncio.Server:
        """Listen; by itself asyncio waits for a minute and for half of one."""
        if kwargs.get("ssl"):
            kwargs |= {"ssl_handshake_timeout": READ_TIMEOUT_S, "ssl_shutdown_timeout": GRACE_S / 2}
        server: asyncio.Server = await super().create_server(*args, **kwargs)
        return server


def listen(config: ServerConfig) -> socket.socket:
    """Take the address; clients may connect from now on.

    Raises:
        ConfigError: it is taken, or none of this machine.
    """
    try:
        family, *_, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        reason = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        raise ConfigError(
            f"host {config.host}, port {config.port}: {reason}; choose others with --host and --port"
        ) from error
    # Connections inherit both. asyncio does without the first where a socket's protocol is not named: an answer's body
    # would wait for 40 ms behind its head.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    return listener


def url_of(listener: socket.socket, config: ServerConfig) -> str:
    """Return where clients find the server."""
    host, port = listener.getsockname()[:2]
    return f"{'https' if config.tls_cert else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def uvicorn_of(app: ASGIApp, config: ServerConfig, access_log: bool) -> Uvicorn:
    """Return uvicorn's server.

    Raises:
        ConfigError: the certificate or its key cannot be used.
    """
    settings = uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=access_log,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=config.max_connections,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=GRACE_S,
        ssl_certfile=config.tls_cert,
        ssl_keyfile=config.tls_key,
    )
    with tls_errors(config):
        settings.load()
    return Uvicorn(settings)


def renew_certificate(server: Uvicorn, config: ServerConfig) -> None:
    """Read the certificate again, for connections that begin from now on.

    Raises:
        ConfigError: it, or its key, cannot be used; then the old one goes on.
    """
    if server.config.ssl and config.tls_cert:
        with tls_errors(config):
            server.config.ssl.load_cert_chain(config.tls_cert, config.tls_key)


@contextlib.contextmanager
def tls_errors(config: ServerConfig) -> Iterator[None]:
    """Say which files cannot be used."""
    try:
        yield
    except OSError as error:  # ssl.SSLError is one
        reason = error.reason if isinstance(error, ssl.SSLError) else error.strerror
        files = " and ".join(str(path) for path in (config.tls_cert, config.tls_key) if path)
        raise ConfigError(f"{files}: no TLS with them: {reason}; give certificate and key in PEM") from error
