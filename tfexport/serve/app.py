"""Build the app with all endpoints.

FastAPI describes them. Requests do not pass its layers, which would take longer than the rest of the server: `App`
finds the endpoint and turns errors into responses.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from importlib.metadata import version

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from tfexport.serve import _schemas as schemas
from tfexport.serve.config import HttpConfig
from tfexport.serve.engine import Engine
from tfexport.serve.http import Route, Service, is_expected, refusal_of
from tfexport.serve.metrics import Metrics
from tfexport.serve.middleware import Exchange, Uploads
from tfexport.serve.routes import openai, translate, ui, v2

logger = logging.getLogger(__name__)
NUM_PATHS = 64  # whose routes are remembered


class App(FastAPI):
    """An app whose requests pass one layer: limits, routes, errors as responses."""

    def __init__(self, service: Service) -> None:
        """Create an app without endpoints."""
        super().__init__(
            title="tfexport",
            version=version("tfexport"),
            description="Transformers over the Open Inference Protocol.",
            docs_url=None,
            redoc_url=None,
            redirect_slashes=False,
            responses={"default": {"model": schemas.Refusal}},
        )
        self.router.route_class = Route
        self.state.service = service
        self._config, self._uploads = service.config, Uploads()
        self._find = functools.lru_cache(NUM_PATHS)(self._route)

    def build_middleware_stack(self) -> ASGIApp:
        """Return the app with the middleware that a caller has added."""
        app: ASGIApp = self._answer
        for wrap, arguments, options in reversed(self.user_middleware):
            app = wrap(app, *arguments, **options)
        return app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or start and stop."""
        if self.middleware_stack is None:
            self.middleware_stack = self.build_middleware_stack()
        scope["app"] = self
        await self.middleware_stack(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.router(scope, receive, send)
            return
        exchange = Exchange(self._config, self._uploads, receive, send)
        try:
            await self._respond(scope, exchange)
        except TimeoutError:
            if not exchange.is_late:
                raise
            logger.info("%s: the client does not read the response", scope["path"])
        finally:
            exchange.close()

    async def _respond(self, scope: Scope, exchange: Exchange) -> None:
        try:
            route, found = self._find(scope["method"], scope["path"].removeprefix(scope.get("root_path", "")))
            scope.update(found)
            await route.handle(scope, exchange.receive, exchange.send)
        except Exception as error:
            if exchange.has_begun:
                raise
            await refusal_of(error, scope["path"])(scope, exchange.receive, exchange.send)
            if not is_expected(error):
                raise  # the server logs it

    def _route(self, method: str, path: str) -> tuple[BaseRoute, Scope]:
        asked, allowed = {"type": "http", "method": method, "path": path}, set[str]()
        for route in self.routes:
            match, found = route.matches(asked)
            if match is Match.FULL:
                return route, found
            if match is Match.PARTIAL:
                allowed |= getattr(route, "methods", None) or set()
        if allowed:
            raise HTTPException(405, headers={"Allow": ", ".join(sorted(allowed))})
        raise HTTPException(404)


def build_app(
    engines: Mapping[str, Engine], config: HttpConfig | None = None, metrics: Metrics | None = None
) -> FastAPI:
    """Build the app; any ASGI server runs it, and other apps can mount it.

    The caller starts and drains the engines, given by model name, on the app's event loop. Metrics and statistics need
    `metrics`, which the observers of the engines record.
    """
    config = config or HttpConfig()
    if metrics:
        metrics.engines = engines
    app = App(Service(engines, config, metrics))
    v2.add_routes(app, has_statistics=metrics is not None, has_metrics=metrics is not None and config.metrics)
    openai.add_routes(app, has_completions=config.completions)
    if config.translate:
        translate.add_routes(app)
    if config.ui:
        ui.add_routes(app)
    return app
