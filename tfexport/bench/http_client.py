"""HTTP/1.1 with as little work as a client can have: what it takes is missing to the server on the same machine."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from tfexport.errors import BenchError, ServingError, printable

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(frozen=True)
class Response:
    """What a server has answered."""

    status: int
    body: bytes

    def json(self) -> Any:
        """Return the body as JSON values.

        Raises:
            BenchError: it is none.
        """
        try:
            return json.loads(self.body)
        except ValueError as error:
            raise BenchError(f"the server's answer is no JSON: {self.words}") from error

    @property
    def words(self) -> str:
        """The body for a message."""
        return printable(self.body[:300].decode(errors="replace").strip())


class HttpClient:
    """Keeps connections open, as many as there are requests at once."""

    def __init__(self, url: str, token: str | None = None) -> None:
        """Take the address of a server, such as http://127.0.0.1:8000, and the bearer token that it asks for."""
        parts = urlsplit(url)
        self._host, self._path = parts.hostname or "", parts.path.rstrip("/")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self._head = f"Host: {parts.netloc.rpartition('@')[2]}\r\nContent-Type: application/json\r\n"
        self._head += f"Authorization: Bearer {token}\r\n" if token else ""
        self._url, self._idle = url, list[Connection]()

    async def get(self, path: str) -> Response:
        """Return what the server answers; see `post`."""
        return await self._exchange("GET", path, b"", lambda: None)

    async def post(self, path: str, data: Any, on_data: Callable[[], None] = lambda: None) -> Response:
        """Send JSON values.

        Args:
            path: below the address of the server.
            data: JSON values.
            on_data: called when a part of the body has come.

        Raises:
            BenchError: the server cannot be reached, or speaks no HTTP/1.1.
            ServingError: it has closed the connection without an answer.
        """
        return await self._exchange("POST", path, json.dumps(data).encode(), on_data)

    def close(self) -> None:
        """Close all connections; a request after it opens others."""
        while self._idle:
            self._idle.pop()[1].close()

    async def _exchange(self, method: str, path: str, body: bytes, on_data: Callable[[], None]) -> Response:
        head = f"{method} {self._path}{path} HTTP/1.1\r\n{self._head}Content-Length: {len(body)}\r\n\r\n"
        try:
            while self._idle:
                connection = self._idle.pop()
                try:
                    return await self._send(connection, head.encode() + body, on_data)
                except (ConnectionError, asyncio.IncompleteReadError) as error:
                    if getattr(error, "partial", b""):
                        raise
                    # The server has closed it meanwhile; a fresh one tells what is wrong, if anything is.
            return await self._send(await self._connect(), head.encode() + body, on_data)
        except (ConnectionResetError, BrokenPipeError, EOFError) as error:
            raise ServingError(f"{self._url}: has closed the connection without an answer") from error
        except OSError as error:
            raise BenchError(f"{self._url}: cannot be asked ({error}); is a server there?") from error
        except (ValueError, asyncio.LimitOverrunError) as error:
            raise BenchError(f"{self._url}: speaks no HTTP/1.1 ({error}); is the address right?") from error

    async def _connect(self) -> Connection:
        return await asyncio.open_connection(self._host, self._port, ssl=self._tls)

    async def _send(self, connection: Connection, message: bytes, on_data: Callable[[], None]) -> Response:
        reader, writer = connection
        keep = False
        try:
            writer.write(message)
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
            body = await _read_body(reader, headers, on_data)
            keep = headers.get("connection", "").lower() != "close" and head[0].startswith("HTTP/1.1 ")
            return Response(int(head[0][9:12]), body)
        finally:
            if keep:
                self._idle.append(connection)
            else:
                writer.close()


async def _read_body(reader: asyncio.StreamReader, headers: dict[str, str], on_data: Callable[[], None]) -> bytes:
    if headers.get("transfer-encoding", "").lower() == "chunked":
        body = bytearray()
        while size := int(await reader.readuntil(b"\r\n"), 16):
            body += (await reader.readexactly(size + 2))[:-2]
            on_data()
        await reader.readuntil(b"\r\n")
        return bytes(body)
    whole = await reader.readexactly(int(headers["content-length"])) if "content-length" in headers else b""
    on_data()
    return whole
