"""Build the FastAPI app with all endpoints."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version

from fastapi import FastAPI

from tfexport.serve import _schemas as schemas
from tfexport.serve.config import HttpConfig
from tfexport.serve.engine import Engine
from tfexport.serve.http import HANDLERS, Route, Service
from tfexport.serve.metrics import Metrics
from tfexport.serve.middleware import BodyLimits
from tfexport.serve.routes import openai, translate, ui, v2


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
    app = FastAPI(
        title="tfexport",
        version=version("tfexport"),
        description="Transformers over the Open Inference Protocol.",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        exception_handlers=HANDLERS,
        responses={"default": {"model": schemas.Refusal}},
    )
    app.router.route_class = Route
    app.add_middleware(BodyLimits, config=config)
    app.state.service = Service(engines, config, metrics)
    v2.add_routes(app, has_statistics=metrics is not None, has_metrics=metrics is not None and config.metrics)
    openai.add_routes(app, has_completions=config.completions)
    if config.translate:
        translate.add_routes(app)
    if config.ui:
        ui.add_routes(app)
    return app
