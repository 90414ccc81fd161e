"""What all endpoints share: the engines by name, and the app's limits."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Mapping

from starlette.requests import ClientDisconnect, Request

from tfexport.errors import shortened
from tfexport.serve.engine import Engine
from tfexport.serve.http.config import HttpConfig
from tfexport.serve.http.errors import RequestError, unavailable
from tfexport.serve.metrics import Metrics
from tfexport.serve.observer import Outcome
from tfexport.serve.protocol.errors import InvalidRequestError

# A bundle has no versions; clients that ask for one ask for this.
VERSION = "1"


class Service:
    """The engines of an app.

    Attributes:
        engines: by the name of their model.
        config: of the app.
        metrics: that the engines' observers and this one count in; None for none.
        is_leaving: set before the server stops: it is not ready any more, though it still answers.
    """

    def __init__(self, engines: Mapping[str, Engine], config: HttpConfig, metrics: Metrics | None) -> None:
        """Take what is served; who starts and drains it is the caller."""
        self.engines, self.config, self.metrics = engines, config, metrics
        self.is_leaving = False

    @property
    def is_alive(self) -> bool:
        """Whether no engine has failed for good."""
        return all(engine.is_alive for engine in self.engines.values())

    @property
    def is_ready(self) -> bool:
        """Whether every model takes requests, and goes on taking them."""
        return not self.is_leaving and all(engine.is_ready for engine in self.engines.values())

    def name(self, request: Request) -> str:
        """Return the name of the model that a request asks for.

        Raises:
            RequestError: there is none of that name or version.
        """
        name = self.chosen(request.path_params["name"])
        version = request.path_params.get("version", VERSION)
        if version != VERSION:
            raise RequestError(404, f"version {shortened(version)} of model {name} is unknown, expected {VERSION}")
        return name

    def chosen(self, name: object) -> str:
        """Return the name of a model that a request gives; None is the only one.

        Raises:
            RequestError: there is none of that name, or None is not clear.
        """
        if name is None and len(self.engines) == 1:
            return next(iter(self.engines))
        if not isinstance(name, str) or name not in self.engines:
            raise RequestError(404, f"model {shortened(name)} is unknown; /v2 lists the models")
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

    @contextlib.contextmanager
    def counted(self, name: str) -> Iterator[None]:
        """Count what is refused, or left, before the model's engine sees it; the engine counts what it sees.

        Some servers tell that a client has left half said by cancelling its task.
        """
        start = time.monotonic()
        try:
            yield
        except (RequestError, InvalidRequestError, ClientDisconnect, asyncio.CancelledError) as error:
            if self.metrics:
                self.metrics.observer(name).ended(_outcome(error), "", time.monotonic() - start, 0, None)
            raise


def _outcome(error: BaseException) -> Outcome:
    if isinstance(error, ClientDisconnect | asyncio.CancelledError):
        return "cancelled"
    return "not_ready" if isinstance(error, RequestError) and error.status_code == 503 else "invalid"


def service_of(request: Request) -> Service:
    """Return the service of the app that a request came to."""
    service: Service = request.app.state.service
    return service
