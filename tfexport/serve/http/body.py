"""The body of a request: bounded while it comes, then read strictly."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from tfexport._io.strict_json import parse_json
from tfexport.errors import shortened
from tfexport.serve.http.errors import RequestError
from tfexport.serve.http.service import service_of
from tfexport.serve.http.structure import check_structure, strings_and_rest

# Parts that a body may come in: each costs a turn of the event loop.
MAX_CHUNKS = 65_536


async def read_body(request: Request) -> bytes:
    """Read all of a body.

    Raises:
        RequestError: its length is not given, or above the limit, or is another than was said.
    """
    limit, headers = service_of(request).config.max_body_bytes, request.headers
    if headers.get("content-encoding", "identity") != "identity":
        raise _left(415, f"Content-Encoding {shortened(headers['content-encoding'])} is not taken; send it plain")
    said = headers.get("content-length")
    if said is None and "transfer-encoding" not in headers and request.scope["http_version"].startswith("1"):
        raise _left(411, "Content-Length is missing; send it")
    if said is not None and not (said.isascii() and said.isdigit()):
        raise _left(400, f"Content-Length is {shortened(said)}, expected a number")
    if said is not None and (len(said) > 12 or int(said) > limit):
        raise _left(413, f"the body has {said[:40]} bytes, the limit is {limit}; send less")
    body, num_chunks = bytearray(), 0
    async for chunk in request.stream():
        body += chunk
        num_chunks += 1
        if len(body) > limit:
            raise _left(413, f"the body is above the limit of {limit} bytes; send less")
        if num_chunks > MAX_CHUNKS:
            raise _left(413, f"the body comes in more than {MAX_CHUNKS} chunks; send larger ones")
    if said is not None and len(body) != int(said):
        raise _left(400, f"the body has {len(body)} bytes, Content-Length says {int(said)}")
    return bytes(body)


async def read_object(request: Request) -> dict[str, Any]:
    """Read a body that is a JSON object.

    Raises:
        RequestError: it is none, or no whole and bounded one.
    """
    check_kind(request, "application/json")
    return parse_object(await read_body(request))


def check_kind(request: Request, *kinds: str) -> None:
    """Refuse a body of another type than these; "" is one that is not said.

    Raises:
        RequestError: it is.
    """
    if (kind := kind_of(request)) not in kinds:
        raise _left(415, f"Content-Type is {shortened(kind)}, expected {kinds[0]}")


def kind_of(request: Request) -> str:
    """Return the type of a body, without its parameters."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def parse_object(raw: bytes) -> dict[str, Any]:
    """Read a JSON object strictly.

    Raises:
        RequestError: it is not JSON, see `parse_json`, not an object, or has too many parts or too deep ones.
    """
    strings, rest = strings_and_rest(raw)
    check_structure(strings, rest)
    try:
        data = parse_json(raw)
    except ValueError as error:
        raise RequestError(400, f"the body is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise RequestError(400, f"the body is {shortened(data)[:100]}, expected a JSON object")
    return data


def _left(status: int, message: str) -> RequestError:
    """Return an error that leaves the rest of the body unread, so that the connection is of no more use."""
    return RequestError(status, message, {"Connection": "close"})
