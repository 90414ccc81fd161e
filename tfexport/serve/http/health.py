"""Whether the server lives, and whether it takes requests."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tfexport.serve.http.errors import unavailable
from tfexport.serve.http.service import service_of


async def live(request: Request) -> Response:
    """Say that the event loop answers; 503 once an engine has failed for good, which a new process mends."""
    if not service_of(request).is_alive:
        raise unavailable("an engine has failed, and the log says why; restart the process")
    return JSONResponse({"live": True})


async def ready(request: Request) -> Response:
    """Say whether every model takes requests; 503 while one is loaded, drained, silent or failed."""
    if not service_of(request).is_ready:
        raise unavailable("not ready")
    return JSONResponse({"ready": True})


ROUTES = [
    *(Route(path, live) for path in ("/v2/health/live", "/livez")),
    *(Route(path, ready) for path in ("/v2/health/ready", "/readyz", "/health")),
]
