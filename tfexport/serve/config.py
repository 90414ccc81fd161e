"""Define the settings of serving: engine, request limits, HTTP app, server."""

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

from tfexport.config import Config, Ge, Gt, Help, Le
from tfexport.errors import ConfigError, raise_all, shortened

# Upper bound of time limits and priorities, in seconds.
MAX_S = 86_400
MAX_BODY_BYTES = 64 * 1024 * 1024
MAX_UPLOAD_BYTES = 1024 * 1024 * 1024
# A model name is part of URLs and a label of metrics.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_NAMED = re.compile(rf"({_NAME.pattern})=(.+)", re.DOTALL)
Seconds = Annotated[float, Ge(0.001), Le(MAX_S)]


class ServingConfig(Config, subject="serving"):
    """Limit concurrent and waiting requests, and their time.

    A request uses `num_beams` or `num_return_sequences` slots. While the sources of new requests are encoded, running
    requests wait, unless a second thread encodes; `encoder_budget` limits the source tokens, including padding, of an
    encoder run. By default they take about 5 ms, but are at least 128. At least one source is always encoded.
    """

    slots: Annotated[int, Ge(1), Le(4096), Help("Maximum rows of each model in a decoder step.")] = 32
    encoder_budget: Annotated[
        int | None, Ge(1), Le(1_000_000), Help("Source tokens to encode between two steps; by default, for 5 ms.")
    ] = None
    max_waiting: Annotated[int, Ge(1), Le(1_000_000), Help("Maximum waiting requests of each model.")] = 256
    max_waiting_tokens: Annotated[int, Ge(1), Le(1_000_000_000), Help("Maximum waiting source tokens.")] = 65_536
    max_num_beams: Annotated[int, Ge(1), Le(64), Help("Maximum beams of a request.")] = 8
    timeout_s: Annotated[float | None, Gt(0), Le(MAX_S), Help("Time limit of a request in seconds.")] = None
    stream_buffer: Annotated[int, Ge(1), Le(1_000_000), Help("Unread tokens at which a stream is cancelled.")] = 256
    stall_s: Annotated[float, Ge(0.1), Le(3600), Help("Seconds without progress until an engine is not ready.")] = 4.0
    hang_s: Annotated[float, Ge(0.1), Le(MAX_S), Help("Seconds without progress until an engine is not live.")] = 60.0

    def _problems(self) -> Iterator[str]:
        if self.hang_s < self.stall_s:
            yield f"hang_s is {self.hang_s}, below stall_s {self.stall_s}; raise it"


class Limits(Config, subject="limits"):
    """Limits of one request."""

    max_body_bytes: Annotated[int, Ge(1024), Le(MAX_BODY_BYTES), Help("Maximum bytes of a request.")] = 1024 * 1024
    max_texts: Annotated[int, Ge(1), Le(4096), Help("Maximum texts of a request.")] = 64
    max_timeout_s: Annotated[Seconds, Help("Maximum time limit that a request can set, in seconds.")] = 60.0


class HttpConfig(Limits, subject="http"):
    """Limits of HTTP requests, and the enabled endpoints."""

    max_upload_bytes: Annotated[
        int, Ge(1024), Le(MAX_UPLOAD_BYTES), Help("Maximum bytes of a request with a file or binary features.")
    ] = 25 * 1024 * 1024
    read_timeout_s: Annotated[Seconds, Help("Maximum seconds between two parts of a request body.")] = 10.0
    body_timeout_s: Annotated[Seconds, Help("Maximum seconds to receive a request body.")] = 60.0
    max_send_s: Annotated[Seconds, Help("Maximum seconds to send a part of a response.")] = 30.0
    ui: Annotated[bool, Help("Serve a web page at / to try the models.")] = True
    metrics: Annotated[bool, Help("Serve /metrics for Prometheus.")] = True
    completions: Annotated[bool, Help("Serve /v1/completions, as in the OpenAI API.")] = False
    translate: Annotated[bool, Help("Serve /translate, as in the LibreTranslate API.")] = False


class ServerConfig(Config, subject="server"):
    """Server address, shutdown and authentication."""

    host: Annotated[str, Help("Address to listen on; 0.0.0.0 for all addresses of the machine.")] = "127.0.0.1"
    port: Annotated[int, Ge(0), Le(65_535), Help("Port to listen on; 0 selects a free one.")] = 8000
    processes: Annotated[
        int, Ge(1), Le(256), Help("Processes that answer requests. Each loads the models; limits are per process.")
    ] = 1
    max_connections: Annotated[int, Ge(1), Le(1_000_000), Help("Maximum open connections; more get 503.")] = 1000
    drain_delay_s: Annotated[
        float, Ge(0), Le(3600), Help("Seconds after SIGTERM in which the server is not ready, but accepts requests.")
    ] = 0.0
    shutdown_timeout_s: Annotated[float, Ge(0), Le(MAX_S), Help("Seconds after that to finish requests.")] = 30.0
    token_file: Annotated[Path | None, Help("File with one bearer token per line; requests need one of them.")] = None
    tls_cert: Annotated[Path | None, Help("TLS certificate in PEM format, with its chain.")] = None
    tls_key: Annotated[Path | None, Help("Private key in PEM format; can be in the certificate's file.")] = None

    def _problems(self) -> Iterator[str]:
        if self.tls_key and not self.tls_cert:
            yield "tls_key is set without tls_cert; set both"
        if self.processes > 1 and sys.platform != "linux":
            yield f"processes is {self.processes}, but only Linux supports several; start servers on other ports"


def named_bundles(arguments: Sequence[str]) -> dict[str, Path]:
    """Parse `[NAME=]BUNDLE` arguments; the default name is the directory name."""
    bundles: dict[str, Path] = {}
    problems = []
    for argument in arguments:
        named = _NAMED.fullmatch(argument)
        path = Path(named[2] if named else argument)
        name = named[1] if named else path.absolute().name
        if not _NAME.fullmatch(name):
            problems.append(f"name {shortened(name)} is not valid in a URL; choose another, as in NAME={argument}")
        elif name in bundles:
            problems.append(f"name {name} is taken by {bundles[name]}; choose another, as in NAME={path}")
        else:
            bundles[name] = path
    raise_all(ConfigError, "serve", problems)
    return bundles
