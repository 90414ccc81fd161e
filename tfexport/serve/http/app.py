"""The app: all endpoints over the engines of their models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from starlette.applications import Starlette
from starlette.routing import BaseRoute

from tfexport.serve.engine import Engine
from tfexport.serve.http import (
    align,
    completions,
    generate,
    health,
    infer,
    metadata,
    monitoring,
    openapi,
    page,
    tokens,
    translate,
)
from tfexport.serve.http.config import HttpConfig
from tfexport.serve.http.errors import HANDLERS
from tfexport.serve.http.service import Service
from tfexport.serve.metrics import Metrics


def build_app(
    engines: Mapping[str, Engine], config: HttpConfig | None = None, metrics: Metrics | None = None
) -> Starlette:
    """Return the app; any ASGI server runs it, and other apps can mount it.

    Args:
        engines: by the name of their model. Their caller starts and drains them, on the app's event loop; until
            they are started the app answers, and is not ready.
        config: limits and endpoints; None for the defaults.
        metrics: whose observers the engines tell; None for no metrics and statistics.
    """
    config = config or HttpConfig()
    if metrics:
        metrics.watch(engines)
    app = Starlette(routes=list(_routes(config, metrics)), exception_handlers=HANDLERS)
    app.router.redirect_slashes = False
    app.state.service = Service(engines, config, metrics)
    return app


def _routes(config: HttpConfig, metrics: Metrics | None) -> Iterator[BaseRoute]:
    """Yield the routes; those that match more come later."""
    yield from health.ROUTES
    if metrics:
        yield from monitoring.STATISTICS
        if config.metrics:
            yield from monitoring.METRICS
    yield from metadata.ROUTES
    yield from infer.ROUTES
    yield from generate.ROUTES
    yield from align.ROUTES
    yield from tokens.ROUTES
    yield from openapi.ROUTES
    if config.completions:
        yield from completions.ROUTES
    if config.translate:
        yield from translate.ROUTES
    if config.ui:
        yield from page.ROUTES
