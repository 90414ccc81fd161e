"""What all endpoints share: the engines by name, and the app's limits."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.requests import Request

from tfexport.errors import shortened
from tfexport.serve.engine import Engine
from tfexport.serve.http.config import HttpConfig
from tfexport.serve.http.errors import RequestError, unavailable

# A bundle has no versions; clients that ask for one ask for this.
VERSION = "1"


class Service:
    """The engines of an app.

    Attributes:
        engines: by the name of their model.
        config: of the app.
        is_leaving: set before the server stops: it is not ready any more, though it still answers.
    """

    def __init__(self, engines: Mapping[str, Engine], config: HttpConfig) -> None:
        """Take what is served; who starts and drains it is the caller."""
        self.engines, self.config = engines, config
        self.is_leaving = False

    @property
    def is_ready(self) -> bool:
        """Whether every model takes requests, and goes on taking them."""
        return not self.is_leaving and all(engine.is_ready for engine in self.engines.values())

    def name(self, request: Request) -> str:
        """Return the name of the model that a request asks for.

        Raises:
            RequestError: there is none of that name or version.
        """
        name = str(request.path_params["name"])
        if name not in self.engines:
            raise RequestError(404, f"model {shortened(name)} is unknown; /v2 lists the models")
        version = request.path_params.get("version", VERSION)
        if version != VERSION:
            raise RequestError(404, f"version {shortened(version)} of model {name} is unknown, expected {VERSION}")
        return name

    def started(self, name: str) -> Engine:
        """Return an engine whose bundle is loaded.

        Raises:
            RequestError: it is still being loaded.
        """
        engine = self.engines[name]
        if engine.state == "starting":
            raise unavailable(f"model {name} is being loaded; come again later")
        return engine


def service_of(request: Request) -> Service:
    """Return the service of the app that a request came to."""
    service: Service = request.app.state.service
    return service
