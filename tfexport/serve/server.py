"""Run the HTTP server: listen, load, serve, reload, drain."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import shlex
import signal
import socket
import ssl
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import uvicorn

from tfexport.errors import ConfigError, TfexportError, printable
from tfexport.runtime.cpu import available_cores
from tfexport.serve._connections import BACKLOG, limited, reserve_files, secured
from tfexport.serve.app import build_app
from tfexport.serve.config import HttpConfig, ServerConfig, ServingConfig
from tfexport.serve.engine import Engine
from tfexport.serve.metrics import Metrics
from tfexport.serve.middleware import BearerTokens

logger = logging.getLogger(__name__)
# With Python's default of 5 ms, the event loop and the engines' threads wait for each other longer than a step takes.
SWITCH_INTERVAL_S = 0.0005
IGNORED = "SIGHUP: ignored while bundles are loading or the server is stopping; send it later"
GRACE_S = 2  # for clients to read the last responses
# By default, the kernel buffers megabytes per connection if the client does not read.
SEND_BUFFER_BYTES = 128 * 1024


class Server:
    """Serve bundles over HTTP.

    The server listens before it loads the bundles. SIGTERM and SIGINT drain it; a second signal, or one while a bundle
    is loaded, ends the process immediately. SIGHUP reloads every bundle from its path, the tokens and the certificate.
    On Windows, Ctrl-C and Ctrl-Break drain the server, SIGTERM ends the process immediately, and nothing reloads.
    """

    def __init__(
        self,
        bundles: Mapping[str, Path],
        config: ServerConfig,
        *,
        serving: ServingConfig,
        http: HttpConfig,
        report: Callable[[str], None],
        access_log: bool = False,
        **options: Any,
    ) -> None:
        """Configure the server; `run` loads the bundles with these `options`."""
        metrics = Metrics()
        self._engines = {
            name: Engine(path, serving, observer=metrics.observer(name), **options) for name, path in bundles.items()
        }
        app = build_app(self._engines, http, metrics)
        self._service, self._config, self._report = app.state.service, config, report
        self._tokens = BearerTokens(app, config.token_file) if config.token_file else None
        # Half of the files that are left is for TLS handshakes, half for new connections: asyncio accepts `backlog` of
        # them in one turn of the event loop, and closes one that is refused within four.
        left = reserve_files(config.max_connections)
        settings = uvicorn.Config(
            self._tokens or app,
            http=limited(config.max_connections),
            backlog=max(1, left // 8),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=access_log,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=GRACE_S,
            ssl_certfile=config.tls_cert,
            ssl_keyfile=config.tls_key,
        )
        with self._tls_errors():
            settings.load()
        self._tls, settings.ssl = settings.ssl, None
        if self._tls:
            settings.http_protocol_class = secured(settings.http_protocol_class, self._tls, max(1, left // 2))
        self._uvicorn = uvicorn.Server(settings)
        self._uvicorn.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
        self._loading = self._is_stopping = self._must_leave = False
        self._reloading: asyncio.Task[None] | None = None

    def run(self) -> bool:
        """Serve until a signal; return whether every accepted request was answered."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        with contextlib.closing(listen(self._config, self._service.config.max_send_s)) as listener:
            return asyncio.run(self._run(listener))

    async def _run(self, listener: socket.socket) -> bool:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        (host, port, *_), start = listener.getsockname(), time.monotonic()
        scheme = "https" if self._config.tls_cert else "http"
        url = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
        with self._signals():
            self._report(f"listening on {url}, not ready yet")
            _warn_of_network(self._config)
            serving = asyncio.create_task(self._uvicorn.serve([listener]))
            try:
                await self._load()
                self._report(f"ready after {time.monotonic() - start:.1f} s; try it:")
                self._report(_example(url, self._engines, self._config))
                if self._service.config.ui:
                    self._report(f"  or open {url}/ in a browser")
                await self._stop.wait()
                is_done = await self._drain()
            finally:
                self._uvicorn.should_exit = True
                await serving
            if self._must_leave:
                leave(0 if is_done else 1)
            return is_done

    async def _load(self) -> None:
        self._loading = True
        try:
            for name, engine in self._engines.items():
                await engine.start()
                self._report(_model_line(name, engine))
            _warn_of_threads(self._engines.values(), self._config.processes)
            _freeze()
        except TfexportError:
            await asyncio.gather(*(engine.drain(0) for engine in self._engines.values()))
            raise
        finally:
            self._loading = False

    async def _drain(self) -> bool:
        timeout_s, settings = self._config.shutdown_timeout_s, self._uvicorn.config
        # Clients with open connections have to reconnect, and a load balancer then selects another server.
        settings.encoded_headers.append((b"connection", b"close"))
        if self._config.drain_delay_s:
            logger.info("stopping: not ready, but requests are accepted for %g s", self._config.drain_delay_s)
            await asyncio.sleep(self._config.drain_delay_s)
        num_open = sum(engine.num_running + engine.num_waiting for engine in self._engines.values())
        logger.info("draining: %d requests to finish within %g s", num_open, timeout_s)
        end = time.monotonic() + timeout_s
        is_done = all(await asyncio.gather(*(engine.drain(timeout_s) for engine in self._engines.values())))
        settings.timeout_graceful_shutdown = GRACE_S + max(0, round(end - time.monotonic()))
        # At exit, Python would wait for a thread that is loading a bundle.
        self._must_leave = not is_done or (self._reloading is not None and not self._reloading.done())
        if is_done:
            logger.info("drained: all requests are answered")
        else:
            logger.error("not all requests were answered within %g s; raise --shutdown-timeout", timeout_s)
        return is_done

    async def _reload(self) -> None:
        for name, engine in self._engines.items():
            start = time.monotonic()
            with _logged_errors(f"model {name}"):
                await engine.replace()
                gc.unfreeze()  # the old model
                _freeze()
                logger.info("model %s: reloaded in %.1f s", name, time.monotonic() - start)
        if self._tokens:
            with _logged_errors("tokens"):
                self._tokens.reload()
        config = self._config
        if self._tls and config.tls_cert:
            with _logged_errors("certificate"), self._tls_errors():
                self._tls.load_cert_chain(config.tls_cert, config.tls_key)

    @contextlib.contextmanager
    def _tls_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:  # ssl.SSLError is one
            reason = error.reason if isinstance(error, ssl.SSLError) else error.strerror
            reason = reason or "they have no certificate with its key"  # as OpenSSL leaves it out for other files
            files = " and ".join(str(path) for path in (self._config.tls_cert, self._config.tls_key) if path)
            raise ConfigError(f"TLS: {files} cannot be used: {reason}; pass a certificate and key in PEM") from error

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        # Unlike the event loop's handlers, these also run while the loop is busy.
        handlers: dict[int, Callable[[int, FrameType | None], None]]
        handlers = {signal.SIGTERM: self._on_stop, signal.SIGINT: self._on_stop}
        if sys.platform == "win32":
            handlers[signal.SIGBREAK] = self._on_stop
        else:
            handlers[signal.SIGHUP] = self._on_reload
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_stop(self, number: int, _frame: FrameType | None) -> None:
        if self._is_stopping:
            leave(128 + number, f"{signal.Signals(number).name} again: aborted")
        if self._loading:
            leave(0, f"{signal.Signals(number).name}: stopped before it was ready")
        self._is_stopping = self._service.is_leaving = True
        self._loop.call_soon_threadsafe(self._stop.set)

    def _on_reload(self, _number: int, _frame: FrameType | None) -> None:
        self._loop.call_soon_threadsafe(self._begin_reload)

    def _begin_reload(self) -> None:
        if self._loading or self._is_stopping or (self._reloading and not self._reloading.done()):
            logger.warning(IGNORED)
        else:
            self._reloading = asyncio.create_task(self._reload())


class _Listener(socket.socket):
    """A socket whose queue is longer than what asyncio accepts at once."""

    def listen(self, _backlog: int = 0) -> None:
        """Keep the length of the queue."""
        super().listen(BACKLOG)


def listen(config: ServerConfig, max_send_s: float = HttpConfig.max_send_s) -> socket.socket:
    """Bind the address; clients that connect wait until the server runs."""
    try:
        kind, flags = socket.SOCK_STREAM, socket.AI_PASSIVE
        family, *_, address = socket.getaddrinfo(config.host, config.port, type=kind, flags=flags)[0]
        listener = _Listener(fileno=socket.create_server(address[:2], family=family, backlog=BACKLOG).detach())
    except OSError as error:
        reason = str(error.strerror).partition(" (while attempting")[0]  # Windows' numbers are not known to os.strerror
        subject = f"host {config.host}, port {config.port}"
        raise ConfigError(f"{subject}: {reason}; choose others with --host and --port") from error
    # Connections inherit these options. asyncio does not set TCP_NODELAY on sockets without an explicit protocol, and
    # then the body of a response waits 40 ms after its head.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux only: closes connections whose client does not read
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(max_send_s * 1000))
    return listener


@contextlib.contextmanager
def _logged_errors(subject: str) -> Iterator[None]:
    try:
        yield
    except TfexportError as error:
        logger.error("%s: not reloaded, the old one stays in use: %s", subject, error)


def _freeze() -> None:
    """Keep what is loaded out of garbage collections, which delay all requests."""
    gc.collect()
    gc.freeze()


def leave(code: int, line: str = "") -> NoReturn:
    """End the process without waiting for its threads."""
    with contextlib.suppress(OSError, RuntimeError):  # a signal may arrive while a line is written
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(2, f"{line}\n".encode() if line else b"")
    os._exit(code)


def _warn_of_threads(engines: Collection[Engine], processes: int) -> None:
    cores = available_cores()
    used = sum(engine.model.threads.decoder * engine.num_replicas for engine in engines if engine.model.threads)
    if used > cores:
        remedy = f"set --threads {max(1, cores // sum(engine.num_replicas for engine in engines))}"
        share = f"{cores} cores" + " of each process" * (processes > 1)
        logger.warning("the models use %d threads on %s, which is slow under load; %s", used, share, remedy)


def _model_line(name: str, engine: Engine) -> str:
    spec, session, threads = engine.model.spec, engine.model.session, engine.model.threads
    used = f", {threads.decoder} thread{'s' * (threads.decoder > 1)}" if threads else ""
    kind, slots, source = f"{spec.layers} decoder layers of", f", {engine.slots} slots", "source"
    target = f" and {spec.max_target_length} target tokens" if spec.has_decoder else ""
    if not spec.has_decoder:
        kind, slots = "encoder of width", ""
        used += f", labels {', '.join(spec.labels)}"[:100] * bool(spec.labels)
    if not spec.has_decoder or engine.model.reads != "text":
        source += f" {spec.source.unit}"
    replicas = f", replicas on {', '.join(engine.devices)}" if engine.num_replicas > 1 else ""
    runs = f"{session.accuracy} on {session.backend}{used}{slots}{replicas}"
    return f"{name}: {kind} {spec.d_model}, {runs}; up to {spec.max_source_length} {source}{target}"


def _warn_of_network(config: ServerConfig) -> None:
    options = {"--token-file": config.token_file, "--tls-cert": config.tls_cert}
    missing = " and ".join(option for option, value in options.items() if value is None)
    if missing and config.host not in ("127.0.0.1", "::1", "localhost"):
        problem = f"host {config.host} accepts requests from other machines"
        logger.warning("%s; set %s unless you trust the network", problem, missing)


def _example(url: str, engines: Mapping[str, Engine], config: ServerConfig) -> str:
    name, engine = next(iter(engines.items()))
    model, tokenizer, path = engine.model, engine.model.tokenizer, f"/v2/models/{name}/generate"
    body: dict[str, object] = {"input_ids": [1, 2, 3]}
    if tokenizer is not None:
        body = {"text_input": tokenizer.text.samples[0].text if tokenizer.text.samples else "Hello"}
    if not model.spec.has_decoder:
        path, body = "/v1/embeddings", {"model": name, "input": next(iter(body.values()))}
    sent = ["-H", "Content-Type: application/json", "-d", json.dumps(body, ensure_ascii=False)]
    if model.reads != "text":
        sent = ["-F", f"file=@{'image.jpg' if model.reads == 'image' else 'speech.wav'}"]
        if not model.spec.has_decoder or model.reads == "features":
            path, sent = f"/v2/models/{name}", []
    command = shlex.join(["curl", url + path, *sent])
    if config.token_file:
        command += f' -H "Authorization: Bearer $(head -n 1 {shlex.quote(str(config.token_file))})"'
    return printable(f"  {command}")
