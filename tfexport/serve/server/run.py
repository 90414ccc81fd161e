"""The life of the server: listen, load, serve, reload, drain."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from starlette.applications import Starlette

from tfexport.errors import TfexportError
from tfexport.serve.config import ServingConfig
from tfexport.serve.engine import Engine
from tfexport.serve.http.app import build_app
from tfexport.serve.http.config import HttpConfig
from tfexport.serve.metrics import Metrics
from tfexport.serve.server.access import BearerTokens
from tfexport.serve.server.config import ServerConfig
from tfexport.serve.server.listen import GRACE_S, EventLoop, listen, renew_certificate, url_of, uvicorn_of
from tfexport.serve.server.welcome import example, model_line, network_warning, threads_warning

logger = logging.getLogger(__name__)
# Seconds after which Python lets another thread go on; with its own 5 ms the event loop and the engines' threads keep
# each other waiting for longer than a step takes.
SWITCH_INTERVAL_S = 0.0005


class Server:
    """Serves engines over HTTP from the first moment, loads them, and drains them when it is told to stop.

    SIGTERM and SIGINT drain; a second one, or one while a bundle is loaded, ends the process at once. SIGHUP
    replaces every bundle by what its path holds now, and reads tokens and certificate again.
    """

    def __init__(
        self,
        app: Starlette,
        engines: Mapping[str, Engine],
        config: ServerConfig,
        report: Callable[[str], None],
        *,
        access_log: bool = False,
    ) -> None:
        """Name what is served; `run` does it.

        Args:
            app: of `build_app`.
            engines: not started, by the name of their model.
            config: address and limits.
            report: called with each line for whoever has started the server.
            access_log: whether uvicorn logs every request.

        Raises:
            ConfigError: the tokens, the certificate or its key cannot be read.
        """
        self._app, self._engines, self._config, self._report = app, engines, config, report
        self._tokens = BearerTokens(app, config.token_file) if config.token_file else None
        self._uvicorn = uvicorn_of(self._tokens or app, config, access_log)
        self._loading = self._is_stopping = self._must_leave = False
        self._reloading: asyncio.Task[None] | None = None

    def run(self) -> bool:
        """Serve until a signal says to stop.

        Returns:
            Whether every request that was accepted was answered.

        Raises:
            TfexportError: the address cannot be had, or a bundle cannot be served.
        """
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        with contextlib.closing(listen(self._config)) as listener, asyncio.Runner(loop_factory=EventLoop) as runner:
            return runner.run(self._run(listener))

    async def _run(self, listener: socket.socket) -> bool:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        url, start = url_of(listener, self._config), time.monotonic()
        with self._signals():
            self._report(f"listening on {url}, not ready yet")
            if warning := network_warning(self._config):
                logger.warning(warning)
            serving = asyncio.create_task(self._uvicorn.serve([listener]))
            try:
                await self._load()
                self._report(f"ready after {time.monotonic() - start:.1f} s; try it:")
                self._report(example(url, self._engines, self._config))
                if self._app.state.service.config.ui:
                    self._report(f"  or open {url}/ in a browser")
                await self._stop.wait()
                is_done = await self._drain()
            finally:
                self._uvicorn.should_exit = True
                await serving
            if self._must_leave:
                _leave(0 if is_done else 1)
            return is_done

    async def _load(self) -> None:
        """Load one bundle after the other; where one cannot be served, none is."""
        self._loading = True
        try:
            for name, engine in self._engines.items():
                await engine.start()
                self._report(model_line(name, engine))
            if warning := threads_warning(self._engines.values()):
                logger.warning(warning)
        except TfexportError:
            await asyncio.gather(*(engine.drain(0) for engine in self._engines.values()))
            raise
        finally:
            self._loading = False

    async def _drain(self) -> bool:
        """Take requests for a while, though not ready; then finish those that were accepted."""
        timeout_s, settings = self._config.shutdown_timeout_s, self._uvicorn.config
        # Clients that keep connections open come anew, which leads them elsewhere.
        settings.encoded_headers.append((b"connection", b"close"))
        if self._config.drain_delay_s:
            logger.info("stopping: not ready any more, requests are taken for %g s", self._config.drain_delay_s)
            await asyncio.sleep(self._config.drain_delay_s)
        under_way = sum(engine.num_running + engine.num_waiting for engine in self._engines.values())
        logger.info("draining: %d requests to finish within %g s", under_way, timeout_s)
        end = time.monotonic() + timeout_s
        is_done = all(await asyncio.gather(*(engine.drain(timeout_s) for engine in self._engines.values())))
        settings.timeout_graceful_shutdown = GRACE_S + max(0, round(end - time.monotonic()))
        # Python would wait for a thread that loads a bundle.
        self._must_leave = not is_done or (self._reloading is not None and not self._reloading.done())
        if is_done:
            logger.info("drained: all requests are answered")
        else:
            logger.error("not all requests were answered within %g s; --shutdown-timeout gives them more", timeout_s)
        return is_done

    async def _reload(self) -> None:
        """Replace every bundle, one after the other; what cannot be replaced goes on as it is."""
        for name, engine in self._engines.items():
            start = time.monotonic()
            with _old_one_goes_on(f"model {name}"):
                await engine.replace()
                logger.info("model %s: reloaded in %.1f s", name, time.monotonic() - start)
        if self._tokens:
            with _old_one_goes_on("tokens"):
                self._tokens.reload()
        with _old_one_goes_on("certificate"):
            renew_certificate(self._uvicorn, self._config)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Listen to signals; also while the event loop is busy, for a second one has to work then."""
        handlers = {signal.SIGTERM: self._on_stop, signal.SIGINT: self._on_stop, signal.SIGHUP: self._on_reload}
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_stop(self, number: int, _frame: FrameType | None) -> None:
        if self._is_stopping:
            _leave(128 + number, f"{signal.Signals(number).name} again: aborted")
        if self._loading:
            _leave(0, f"{signal.Signals(number).name}: stopped before it was ready")
        self._is_stopping = self._app.state.service.is_leaving = True
        self._loop.call_soon_threadsafe(self._stop.set)

    def _on_reload(self, _number: int, _frame: FrameType | None) -> None:
        self._loop.call_soon_threadsafe(self._begin_reload)

    def _begin_reload(self) -> None:
        if self._loading or self._is_stopping or (self._reloading and not self._reloading.done()):
            logger.warning("SIGHUP: nothing is reloaded while bundles are loaded or the server stops; send it later")
        else:
            self._reloading = asyncio.create_task(self._reload())


def serve_bundles(
    bundles: Mapping[str, Path],
    config: ServerConfig,
    *,
    serving: ServingConfig,
    http: HttpConfig,
    report: Callable[[str], None],
    access_log: bool = False,
    **options: Any,
) -> bool:
    """Serve bundles until a signal says to stop.

    Args:
        bundles: by the name that they are served under.
        config: address and limits.
        serving: slots and queue, of each model.
        http: endpoints and limits of requests.
        report: called with each line for whoever has started the server.
        access_log: whether every request is logged.
        options: of `tfexport.load`: backend, form, threads, device, engine, trusted_keys.

    Returns:
        Whether every request that was accepted was answered.

    Raises:
        TfexportError: the address cannot be had, or a bundle cannot be served.
    """
    metrics = Metrics()
    engines = {
        name: Engine(path, serving, observer=metrics.observer(name), **options) for name, path in bundles.items()
    }
    app = build_app(engines, http, metrics)
    return Server(app, engines, config, report, access_log=access_log).run()


@contextlib.contextmanager
def _old_one_goes_on(what: str) -> Iterator[None]:
    try:
        yield
    except TfexportError as error:
        logger.error("%s: not reloaded, the old one goes on: %s", what, error)


def _leave(code: int, line: str = "") -> NoReturn:
    """End the process whatever its threads do."""
    with contextlib.suppress(OSError, RuntimeError):  # a signal may come while a line is written
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(2, f"{line}\n".encode() if line else b"")
    os._exit(code)
