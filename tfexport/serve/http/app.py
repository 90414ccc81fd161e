"""The app: all endpoints over the engines of their models."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.applications import Starlette

from tfexport.serve.engine import Engine
from tfexport.serve.http import generate, health
from tfexport.serve.http.config import HttpConfig
from tfexport.serve.http.errors import HANDLERS
from tfexport.serve.http.service import Service


def build_app(engines: Mapping[str, Engine], config: HttpConfig | None = None) -> Starlette:
    """Return the app; any ASGI server runs it, and other apps can mount it.

    Args:
        engines: by the name of their model. Their caller starts and drains them, on the app's event loop; until
            they are started the app answers, and is not ready.
        config: limits and endpoints; None for the defaults.
    """
    app = Starlette(routes=[*health.ROUTES, *generate.ROUTES], exception_handlers=HANDLERS)
    app.router.redirect_slashes = False
    app.state.service = Service(engines, config or HttpConfig())
    return app
