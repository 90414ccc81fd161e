"""Provide the base of all HTTP endpoints: bodies, errors and event streams."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import time
import typing
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fastapi.routing import APIRoute
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from tfexport.errors import InputError, TfexportError, printable, shortened
from tfexport.serve._schemas import FILES, Body, form_of
from tfexport.serve._served import outcome_of
from tfexport.serve.config import HttpConfig
from tfexport.serve.engine import Engine
from tfexport.serve.inference import InvalidRequestError, Submitted, bounded, numbered
from tfexport.serve.metrics import Measured, Metrics
from tfexport.serve.observer import Outcome

logger = logging.getLogger(__name__)
VERSION = "1"  # bundles have no versions; this is for clients that require one
RETRY_AFTER_S = 1  # default of the Retry-After header
WATCH_AFTER_S = 0.01
CLIENT_CLOSED_REQUEST = 499  # as in nginx's log; nobody receives it
JSON_LENGTH = "Inference-Header-Content-Length"  # in bytes; the binary tensors follow
OPENAI = ("/v1/audio/transcriptions", "/v1/completions", "/v1/embeddings", "/v1/models")
_STATUS: dict[Outcome, int] = {
    "invalid": 400,
    "queue_full": 429,
    "cancelled": CLIENT_CLOSED_REQUEST,
    "error": 500,
    "draining": 503,
    "deadline": 504,
}
_REFUSALS: dict[int, Outcome] = {429: "queue_full", 503: "not_ready"}


class RequestError(HTTPException):
    """Reject a request before it reaches an engine."""

    def __init__(self, status: int, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(status, printable(message), headers)


def unavailable(message: str) -> RequestError:
    """Return a 503 error with a Retry-After header."""
    return RequestError(503, message, {"Retry-After": str(RETRY_AFTER_S)})


@dataclass(frozen=True)
class Health:
    """The state of one process of a server."""

    is_alive: bool
    is_leaving: bool
    ready: Mapping[str, bool]  # by model


class Service:
    """The engines of an app, by model name; their owner starts and drains them."""

    def __init__(self, engines: Mapping[str, Engine], config: HttpConfig, metrics: Metrics | None) -> None:
        self.engines, self.config, self.metrics = engines, config, metrics
        self.is_leaving = False  # a draining server reports not ready but still answers
        # Returns the result of a method in each process of the server; one with several processes sets it.
        self.everywhere: Callable[[Literal["health", "measured"]], Awaitable[list[Any]]] = self._here

    async def _here(self, method: str) -> list[Any]:
        return [getattr(self, method)()]

    def health(self) -> Health:
        """Return the state of this process."""
        engines = self.engines
        is_alive = all(engine.is_alive for engine in engines.values())
        return Health(is_alive, self.is_leaving, {name: engine.is_ready for name, engine in engines.items()})

    def measured(self) -> Measured:
        """Return the metrics of this process."""
        assert self.metrics, "without metrics, no endpoint asks for them"
        return self.metrics.measured()

    def model_name(self, name: str | None) -> str:
        """Return the model name of a request; None selects the only model."""
        if name is None and len(self.engines) == 1:
            return next(iter(self.engines))
        if name not in self.engines:
            raise RequestError(404, f"model {shortened(name)} is unknown; /v2 lists the models")
        return typing.cast(str, name)

    def loaded_engine(self, name: str) -> Engine:
        """Return an engine; raise `RequestError` if its bundle is still loading."""
        engine = self.engines[name]
        if engine.state == "starting":
            with self.count_refusals(name):
                raise unavailable(f"model {name} is loading; try again later")
        return engine

    def reads_files(self, name: str) -> bool:
        """Return whether a loaded model reads audio or images."""
        engine = self.engines[name]
        return engine.state != "starting" and engine.model.reads != "text"

    def check_number(self, what: str, number: int) -> None:
        """Raise `RequestError` if there are no texts or too many."""
        if not 1 <= number <= self.config.max_texts:
            raise RequestError(400, f"the request has {number} {what}, expected 1 to {self.config.max_texts}")

    @contextlib.contextmanager
    def count_refusals(self, name: str) -> Iterator[None]:
        """Count requests that are refused or cancelled before they reach an engine."""
        start = time.monotonic()
        try:
            yield
        # Some servers cancel the task of a client that disconnects.
        except (RequestError, InvalidRequestError, ClientDisconnect, asyncio.CancelledError) as error:
            outcome = _REFUSALS.get(getattr(error, "status_code", 0), "invalid")
            if isinstance(error, ClientDisconnect | asyncio.CancelledError):
                outcome = "cancelled"
            if self.metrics:
                self.metrics.observer(name).ended(outcome, "", time.monotonic() - start, 0, None)
            raise


def service_of(request: Request) -> Service:
    """Return the service of a request's app."""
    service: Service = request.app.state.service
    return service


class Route(APIRoute):
    """Call an endpoint with the request, its path's `name`, and its body as `data`.

    FastAPI's dependency resolution would take longer than the rest of the request handling.
    """

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request with the endpoint's response."""
        request = Request(scope, receive)
        service, arguments, path = service_of(request), dict[str, Any](), request.path_params
        if "name" in path:
            name = arguments["name"] = service.model_name(path["name"])
            if (version := path.get("version", VERSION)) != VERSION:
                raise RequestError(404, f"version {shortened(version)} of model {name} is unknown, expected 1")
        if (body_type := self._body_type) is not None:
            arguments["data"] = await _read(request, service, body_type, arguments.get("name"))
        response: Response = await self.endpoint(request, **arguments)
        await response(scope, receive, send)

    @functools.cached_property
    def _body_type(self) -> type[Body] | None:
        return typing.get_type_hints(self.endpoint).get("data")


async def _read(request: Request, service: Service, body_type: type[Body], name: str | None) -> Body:
    if name is None and len(service.engines) == 1:
        name = next(iter(service.engines))
    with service.count_refusals(name) if name else contextlib.nullcontext():
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type not in body_type.media_types:
            raise _closing(415, f"Content-Type is {shortened(media_type)}, expected {body_type.media_types[0]}")
        if media_type == FILES:
            return body_type.parse_form(await _read_form(request, service.config))
        length, limit, json_length = request.headers.get(JSON_LENGTH), service.config.max_body_bytes, None
        is_large = length is not None and name is not None and service.reads_files(name)
        body_limit = service.config.max_upload_bytes if is_large else limit
        raw = b"".join([chunk async for chunk in _chunks(request, body_limit)])
        if length is not None:
            if not (length.isascii() and length.isdigit()) or len(length) > 12 or int(length) > len(raw):
                raise RequestError(400, f"{JSON_LENGTH} is {shortened(length)}, expected a number up to {len(raw)}")
            json_length = int(length)
            if json_length > limit:
                raise RequestError(413, f"the JSON has {json_length} bytes, the limit is {limit}; send binary data")
        return body_type.parse(raw, media_type, json_length)


class _FormParser(MultiPartParser):
    spool_max_size = 0  # keep files in memory, because the file system may be read-only
    is_ended = False

    def on_end(self) -> None:
        self.is_ended = True


async def _read_form(request: Request, config: HttpConfig) -> dict[str, str | bytes]:
    async def chunks() -> AsyncGenerator[bytes]:
        async for chunk in _chunks(request, config.max_upload_bytes):
            yield chunk
        if not parser.is_ended:
            raise MultiPartException("The end is missing.")

    sizes = {"max_files": 1, "max_fields": 100, "max_part_size": config.max_body_bytes}
    parser = _FormParser(request.headers, chunks(), **sizes)
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise _closing(400, f"the body is not a form: {error.message}") from error
    try:
        pairs = form.multi_items()
        return form_of([(name, await one.read() if isinstance(one, UploadFile) else one) for name, one in pairs])
    finally:
        await form.close()


async def _chunks(request: Request, limit: int) -> AsyncGenerator[bytes]:
    headers = request.headers
    if headers.get("content-encoding", "identity") != "identity":
        encoding = shortened(headers["content-encoding"])
        raise _closing(415, f"Content-Encoding {encoding} is not supported; send the body uncompressed")
    length = headers.get("content-length")
    if length is None and "transfer-encoding" not in headers and request.scope["http_version"].startswith("1"):
        raise _closing(411, "Content-Length is missing; send it")
    if length is not None and not (length.isascii() and length.isdigit()):
        raise _closing(400, f"Content-Length is {shortened(length)}, expected a number")
    if length is not None and (len(length) > 12 or int(length) > limit):
        raise _closing(413, f"the body has {length[:40]} bytes, the limit is {limit}; send less")
    received, is_whole = 0, False
    while not is_whole:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunk, is_whole = message.get("body", b""), not message.get("more_body", False)
        received += len(chunk)
        if received > limit:
            raise _closing(413, f"the body is above the limit of {limit} bytes; send less")
        yield chunk


def _closing(status: int, message: str) -> RequestError:
    # Part of the body is unread, so the connection cannot be used again.
    return RequestError(status, message, {"Connection": "close"})


def message_of(error: Exception) -> str:
    """Return an error message of bounded length for the client."""
    return bounded(error.detail if isinstance(error, HTTPException) else str(error))


def is_expected(error: Exception) -> bool:
    """Return whether an error is an answer, rather than a fault of the server."""
    return isinstance(error, HTTPException | TfexportError | ClientDisconnect)


def refusal_of(error: Exception, path: str) -> Response:
    """Return the response to a request that raised an error."""
    status, message, headers = _STATUS[outcome_of(error)], message_of(error), None
    if isinstance(error, HTTPException):
        status, headers = error.status_code, error.headers
    elif isinstance(error, ClientDisconnect):
        status, message = CLIENT_CLOSED_REQUEST, "the client disconnected"
    elif status in (429, 503):
        headers = {"Retry-After": str(getattr(error, "retry_after_s", RETRY_AFTER_S))}
    elif not isinstance(error, TfexportError):
        message = "internal error; see the server's log"
    elif status == 500:
        logger.error("%s: %s", path, error)
    body: object = message
    if path.endswith(OPENAI):
        kind = "invalid_request_error" if status < 500 else "server_error"
        body = {"message": message, "type": kind, "code": status}
    return JSONResponse({"error": body}, status, headers)


@contextlib.contextmanager
def while_connected(receive: Receive, *generations: Submitted) -> Iterator[None]:
    """Cancel generations if the client disconnects, or when the block ends.

    A task watches the client, which costs more than a short answer, so it starts a little later.
    """
    watchers: list[asyncio.Task[None]] = []

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        for generation in generations:
            generation.cancel()

    start = asyncio.get_running_loop().call_later(WATCH_AFTER_S, lambda: watchers.append(asyncio.create_task(watch())))
    try:
        yield
    finally:
        start.cancel()
        for watcher in watchers:
            watcher.cancel()
        for generation in generations:
            generation.cancel()


async def answers_of(request: Request, generations: Sequence[Submitted]) -> list[list[Any]]:
    """Wait for the answers of generations; cancel them if the client disconnects."""
    with while_connected(request.receive, *generations):
        answers = []
        for number, generation in enumerate(generations, 1):
            try:
                answers.append(await generation)
            except InputError as error:  # the source could not be read
                raise numbered(error, number, len(generations)) from error
        return answers


def event(data: dict[str, Any], kind: str = "") -> bytes:
    """Format a server-sent event."""
    head = f"event: {kind}\n" if kind else ""
    return f"{head}data: {json.dumps(data, ensure_ascii=False, allow_nan=False)}\n\n".encode()


class EventStream(Response):
    """Send server-sent events; errors after the first one are events too."""

    media_type = "text/event-stream"

    def __init__(self, generation: Submitted, events: AsyncGenerator[bytes]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["Content-Length"]
        self._generation, self._events = generation, events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events; raise if the first one is an error."""
        with while_connected(receive, self._generation):
            await self._stream(send)

    async def _stream(self, send: Send) -> None:
        async with contextlib.aclosing(self._events) as events:
            first = await anext(events)
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": first, "more_body": True})
            try:
                async for body in events:
                    await send({"type": "http.response.body", "body": body, "more_body": True})
            except TfexportError as error:
                body = event({"error": message_of(error)}, "error")
                await send({"type": "http.response.body", "body": body, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
