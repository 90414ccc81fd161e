"""Provide the base of all HTTP endpoints: bodies, errors and event streams."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
import typing
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any

from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from tfexport.errors import (
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    Draining,
    InputError,
    QueueFull,
    TfexportError,
    printable,
    shortened,
)
from tfexport.serve._schemas import Body
from tfexport.serve.config import HttpConfig
from tfexport.serve.engine import Engine
from tfexport.serve.inference import Asked, InvalidRequestError, bounded
from tfexport.serve.metrics import Metrics
from tfexport.serve.observer import Outcome

logger = logging.getLogger(__name__)
# Bundles have no versions; clients that require one use this.
VERSION = "1"
# Default Retry-After header, in seconds.
RETRY_AFTER_S = 1
# The client is gone and cannot read it; nginx logs disconnected clients with this status.
CLIENT_GONE = 499
# Header with the length in bytes of the JSON before the binary tensors.
JSON_LENGTH = "Inference-Header-Content-Length"
OPENAI = ("/v1/completions", "/v1/models")
_STATUS: dict[type[Exception], int] = {
    ConfigError: 400,
    InputError: 400,
    QueueFull: 429,
    Cancelled: CLIENT_GONE,
    ClientDisconnect: CLIENT_GONE,
    Draining: 503,
    DeadlineExceeded: 504,
}


class RequestError(HTTPException):
    """Reject a request before it reaches an engine."""

    def __init__(self, status: int, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(status, printable(message), headers)


def unavailable(message: str) -> RequestError:
    """Return a 503 error with a Retry-After header."""
    return RequestError(503, message, {"Retry-After": str(RETRY_AFTER_S)})


class Service:
    """The engines of an app, by model name; their owner starts and drains them.

    Attributes:
        metrics: counts the requests; None disables metrics.
        is_leaving: true while the server drains; it reports not ready but still answers.
    """

    def __init__(self, engines: Mapping[str, Engine], config: HttpConfig, metrics: Metrics | None) -> None:
        self.engines, self.config, self.metrics = engines, config, metrics
        self.is_leaving = False

    def chosen(self, name: str | None) -> str:
        """Return the model name of a request; None selects the only model."""
        if name is None and len(self.engines) == 1:
            return next(iter(self.engines))
        if name not in self.engines:
            raise RequestError(404, f"model {shortened(name)} is unknown; /v2 lists the models")
        return typing.cast(str, name)

    def path(self, name: str | None = None, version: str = VERSION, **_: Any) -> dict[str, str]:
        """Return the model name in a path; raise `RequestError` if it is unknown."""
        if name is None:
            return {}
        name = self.chosen(name)
        if version != VERSION:
            raise RequestError(404, f"version {shortened(version)} of model {name} is unknown, expected {VERSION}")
        return {"name": name}

    def started(self, name: str) -> Engine:
        """Return an engine; raise `RequestError` if its bundle is still loading."""
        engine = self.engines[name]
        if engine.state == "starting":
            with self.counted(name):
                raise unavailable(f"model {name} is being loaded; come again later")
        return engine

    def check_number(self, what: str, number: int) -> None:
        """Raise `RequestError` if there are no texts or too many."""
        if not 1 <= number <= self.config.max_texts:
            raise RequestError(400, f"{number} {what} are given, expected 1 to {self.config.max_texts}")

    @contextlib.contextmanager
    def counted(self, name: str) -> Iterator[None]:
        """Count requests that are refused or cancelled before they reach an engine.

        Some servers cancel the task of a client that disconnects.
        """
        start = time.monotonic()
        try:
            yield
        except (RequestError, InvalidRequestError, ClientDisconnect, asyncio.CancelledError) as error:
            outcome: Outcome = "cancelled"
            if isinstance(error, RequestError | InvalidRequestError):
                is_unavailable = isinstance(error, RequestError) and error.status_code == 503
                outcome = "not_ready" if is_unavailable else "invalid"
            if self.metrics:
                self.metrics.observer(name).ended(outcome, "", time.monotonic() - start, 0, None)
            raise


def service_of(request: Request) -> Service:
    """Return the service of a request's app."""
    service: Service = request.app.state.service
    return service


# ---- routes and bodies


class Route(APIRoute):
    """Call an endpoint with the request, its path's `name`, and its body as `data`.

    The endpoint's signature defines the OpenAPI document. FastAPI's dependency resolution is skipped because it takes
    longer than the rest of the request handling.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the ASGI request handler."""
        kind: type[Body] | None = typing.get_type_hints(self.endpoint).get("data")
        endpoint = self.endpoint

        async def handle(request: Request) -> Response:
            service = service_of(request)
            given: dict[str, Any] = service.path(**request.path_params)
            if kind is not None:
                given["data"] = await _read(request, service, kind, given.get("name"))
            response: Response = await endpoint(request, **given)
            return response

        return handle


async def _read(request: Request, service: Service, kind: type[Body], name: str | None) -> Body:
    counted = name or (next(iter(service.engines)) if len(service.engines) == 1 else None)
    with service.counted(counted) if counted else contextlib.nullcontext():
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type not in kind.media_types:
            raise _left(415, f"Content-Type is {shortened(media_type)}, expected {kind.media_types[0]}")
        raw, json_length = await _read_body(request, service.config.max_body_bytes), None
        if (said := request.headers.get(JSON_LENGTH)) is not None:
            if not (said.isascii() and said.isdigit()) or len(said) > 12 or int(said) > len(raw):
                raise RequestError(400, f"{JSON_LENGTH} is {shortened(said)}, expected a number up to {len(raw)}")
            json_length = int(said)
        return kind.parse(raw, media_type, json_length)


async def _read_body(request: Request, limit: int) -> bytes:
    headers = request.headers
    if headers.get("content-encoding", "identity") != "identity":
        raise _left(415, f"Content-Encoding {shortened(headers['content-encoding'])} is not taken; send it plain")
    said = headers.get("content-length")
    if said is None and "transfer-encoding" not in headers and request.scope["http_version"].startswith("1"):
        raise _left(411, "Content-Length is missing; send it")
    if said is not None and not (said.isascii() and said.isdigit()):
        raise _left(400, f"Content-Length is {shortened(said)}, expected a number")
    if said is not None and (len(said) > 12 or int(said) > limit):
        raise _left(413, f"the body has {said[:40]} bytes, the limit is {limit}; send less")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise _left(413, f"the body is above the limit of {limit} bytes; send less")
    return bytes(body)


def _left(status: int, message: str) -> RequestError:
    """Return an error that closes the connection, because the body is unread."""
    return RequestError(status, message, {"Connection": "close"})


# ---- errors


def message_of(error: Exception) -> str:
    """Return an error message of bounded length for the client."""
    return bounded(error.detail if isinstance(error, HTTPException) else str(error))


async def _on_error(request: Request, error: Exception) -> Response:
    status = next((status for kind, status in _STATUS.items() if isinstance(error, kind)), 500)
    message, headers = message_of(error), None
    if isinstance(error, HTTPException):
        status, headers = error.status_code, error.headers
    elif isinstance(error, QueueFull):
        headers = {"Retry-After": str(error.retry_after_s)}
    elif status == 503:
        headers = {"Retry-After": str(RETRY_AFTER_S)}
    elif isinstance(error, ClientDisconnect):
        message = "the client has gone"
    elif not isinstance(error, TfexportError):
        message = "the server has failed; its log says how"
    elif status == 500:
        logger.error("%s: %s", request.scope["path"], error)
    is_openai = request.scope["path"].endswith(OPENAI)
    kind = "invalid_request_error" if status < 500 else "server_error"
    answer = {"message": message, "type": kind, "code": status} if is_openai else message
    return JSONResponse({"error": answer}, status, headers)


HANDLERS: dict[int | type[Exception], Any] = dict.fromkeys(
    (HTTPException, TfexportError, ClientDisconnect, Exception), _on_error
)


# ---- clients


@contextlib.asynccontextmanager
async def while_connected(receive: Receive, *asked: Asked) -> AsyncIterator[None]:
    """Cancel generations if the client disconnects, or when the block ends.

    The request body must already have been read.
    """

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        for one in asked:
            one.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
        for one in asked:
            one.cancel()


async def answered(request: Request, asked: Sequence[Asked]) -> list[list[Any]]:
    """Return the answers of generations; cancel them if the client disconnects."""
    async with while_connected(request.receive, *asked):
        return [await one for one in asked]


def event(data: dict[str, Any], kind: str = "") -> bytes:
    """Format a server-sent event."""
    head = f"event: {kind}\n" if kind else ""
    return f"{head}data: {json.dumps(data, ensure_ascii=False, allow_nan=False)}\n\n".encode()


class EventStream(Response):
    """Send server-sent events as they are generated.

    If the client disconnects or does not read, the generation is cancelled. The response status depends on the first
    event; later errors are sent as events.
    """

    media_type = "text/event-stream"

    def __init__(self, asked: Asked, events: AsyncGenerator[bytes]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["Content-Length"]
        self._asked, self._events = asked, events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events; raise if the first one is an error."""
        async with while_connected(receive, self._asked), contextlib.aclosing(self._events) as events:
            first = await anext(events)
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": first, "more_body": True})
            try:
                async for one in events:
                    await send({"type": "http.response.body", "body": one, "more_body": True})
            except TfexportError as error:
                body = event({"error": message_of(error)}, "error")
                await send({"type": "http.response.body", "body": body, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
