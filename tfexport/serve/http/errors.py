"""What a client is told when it gets no answer: a status code and one line of JSON, never a trace."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from tfexport.errors import (
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    Draining,
    InputError,
    QueueFull,
    TfexportError,
    printable,
)
from tfexport.serve.protocol.errors import bounded

logger = logging.getLogger(__name__)
# Seconds after which a client should ask again where nothing better is known.
RETRY_AFTER_S = 1
# Nobody reads it, for the client has gone; nginx counts such requests under it.
CLIENT_GONE = 499
OPENAI = ("/v1/completions", "/v1/models")
_STATUS: dict[type[TfexportError], int] = {
    ConfigError: 400,
    InputError: 400,
    QueueFull: 429,
    Cancelled: CLIENT_GONE,
    Draining: 503,
    DeadlineExceeded: 504,
}


class RequestError(HTTPException):
    """A request that is refused before an engine sees it."""

    def __init__(self, status: int, message: str, headers: dict[str, str] | None = None) -> None:
        """Keep what the client is told."""
        super().__init__(status, printable(message), headers)


def unavailable(message: str) -> RequestError:
    """Return the error for what is not there yet, or not any more."""
    return RequestError(503, message, {"Retry-After": str(RETRY_AFTER_S)})


def message_of(error: Exception) -> str:
    """Return the line that a client is told, of bounded length."""
    return bounded(error.detail if isinstance(error, HTTPException) else str(error))


def status_of(error: TfexportError) -> int:
    """Return the status code of an error; 500 for what is no fault of the client."""
    return next((status for kind, status in _STATUS.items() if isinstance(error, kind)), 500)


async def on_refusal(request: Request, error: Exception) -> Response:
    """Answer a request that starlette, or we, refuse."""
    assert isinstance(error, HTTPException)
    return _answer(request, error.status_code, message_of(error), error.headers)


async def on_error(request: Request, error: Exception) -> Response:
    """Answer a request that the engine does not."""
    assert isinstance(error, TfexportError)
    status, headers = status_of(error), {}
    if status == 500:
        logger.error("%s: %s", request.scope["path"], error)
    if isinstance(error, QueueFull):
        headers["Retry-After"] = str(error.retry_after_s)
    elif status == 503:
        headers["Retry-After"] = str(RETRY_AFTER_S)
    return _answer(request, status, message_of(error), headers)


async def on_client_gone(request: Request, error: Exception) -> Response:
    """End a request that its client has left half said."""
    return _answer(request, CLIENT_GONE, "the client has gone")


async def on_surprise(request: Request, error: Exception) -> Response:
    """Answer what should not happen; the log has the trace, the client has not."""
    return _answer(request, 500, "the server has failed; its log says how")


def _answer(request: Request, status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    """Return the error as the Open Inference Protocol has it, or as OpenAI has it for its own endpoints."""
    is_openai = request.scope["path"].endswith(OPENAI)
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": message, "type": kind, "code": status} if is_openai else message
    return JSONResponse({"error": error}, status, headers)


HANDLERS = {
    HTTPException: on_refusal,
    TfexportError: on_error,
    ClientDisconnect: on_client_gone,
    Exception: on_surprise,
}
