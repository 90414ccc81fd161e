"""The description of all endpoints, checked in beside this file."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route


@cache
def document() -> bytes:
    """Return the OpenAPI document."""
    return (files("tfexport.serve.http") / "openapi.json").read_bytes()


async def describe(request: Request) -> Response:
    """Return the OpenAPI document."""
    return Response(document(), media_type="application/json")


ROUTES = [Route("/openapi.json", describe)]
