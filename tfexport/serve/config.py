"""Define the settings of serving: engine, request limits, HTTP app, server."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

from tfexport.config import Config, Ge, Gt, Help, Le
from tfexport.errors import ConfigError, raise_all, shortened

# Upper bound of time limits and priorities, in seconds.
MAX_S = 86_400
MAX_BODY_BYTES = 64 * 1024 * 1024
# A model name is part of URLs and a label of metrics.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_NAMED = re.compile(rf"({_NAME.pattern})=(.+)", re.DOTALL)
Seconds = Annotated[float, Ge(0.001), Le(MAX_S)]


class ServingConfig(Config, subject="serving"):
    """Limit concurrent and waiting requests, and their time.

    A request uses `num_beams` or `num_return_sequences` slots. While the sources of new requests are encoded, running
    requests wait; `encoder_budget` limits the source tokens, including padding, that are encoded between two steps. At
    least one source is always encoded.
    """

    slots: Annotated[int, Ge(1), Le(4096), Help("Rows of each model that are decoded at once.")] = 32
    encoder_budget: Annotated[int, Ge(1), Le(1_000_000), Help("Source tokens that are encoded between two steps.")] = (
        128
    )
    max_waiting: Annotated[int, Ge(1), Le(1_000_000), Help("Requests of each model that may wait.")] = 256
    max_waiting_tokens: Annotated[int, Ge(1), Le(1_000_000_000), Help("Source tokens that may wait.")] = 65_536
    max_num_beams: Annotated[int, Ge(1), Le(64), Help("Most beams of a request.")] = 8
    timeout_s: Annotated[
        float | None, Gt(0), Le(MAX_S), Help("Seconds that a request may take; no limit when not given.")
    ] = None
    stream_buffer: Annotated[
        int, Ge(1), Le(1_000_000), Help("Tokens that a reader may be behind before its request is cancelled.")
    ] = 256
    stall_s: Annotated[
        float, Ge(0.1), Le(3600), Help("Seconds without progress of the engine's thread after which it is not ready.")
    ] = 4.0
    hang_s: Annotated[
        float, Ge(0.1), Le(86_400), Help("Seconds without progress after which the engine counts as dead.")
    ] = 60.0

    def _problems(self) -> Iterator[str]:
        if self.hang_s < self.stall_s:
            yield f"hang_s is {self.hang_s}, below stall_s {self.stall_s}; a thread is silent before it is given up"


class Limits(Config, subject="limits"):
    """Limits of one request."""

    max_body_bytes: Annotated[int, Ge(1024), Le(MAX_BODY_BYTES), Help("Bytes of a request.")] = 1024 * 1024
    max_texts: Annotated[int, Ge(1), Le(4096), Help("Texts of a request that takes several.")] = 64
    max_timeout_s: Annotated[Seconds, Help("Seconds that a request may take, whatever it asks for.")] = 60.0


class HttpConfig(Limits, subject="http"):
    """Limits of HTTP requests, and the enabled endpoints."""

    read_timeout_s: Annotated[Seconds, Help("Seconds between two parts of a body.")] = 10.0
    body_timeout_s: Annotated[Seconds, Help("Seconds for a whole body.")] = 60.0
    max_send_s: Annotated[Seconds, Help("Seconds that a part of an answer may wait for its reader.")] = 30.0
    ui: Annotated[bool, Help("Offer a page at / to try the models.")] = True
    metrics: Annotated[bool, Help("Offer /metrics for Prometheus.")] = True
    completions: Annotated[bool, Help("Offer /v1/completions, the protocol of OpenAI.")] = False
    translate: Annotated[bool, Help("Offer /translate, the protocol of LibreTranslate.")] = False


class ServerConfig(Config, subject="server"):
    """Server address, shutdown and authentication."""

    host: Annotated[str, Help("Address to listen on; 0.0.0.0 is all of the machine.")] = "127.0.0.1"
    port: Annotated[int, Ge(0), Le(65_535), Help("Port to listen on; 0 takes one that is free.")] = 8000
    max_connections: Annotated[int, Ge(1), Le(1_000_000), Help("Connections open at once; more get 503.")] = 1000
    drain_delay_s: Annotated[
        float,
        Ge(0),
        Le(3600),
        Help("Seconds after SIGTERM in which requests are still taken, though the server is not ready."),
    ] = 0.0
    shutdown_timeout_s: Annotated[
        float, Ge(0), Le(86_400), Help("Seconds after that in which accepted requests are finished.")
    ] = 30.0
    token_file: Annotated[
        Path | None, Help("File with one bearer token a line; without one everybody may send requests.")
    ] = None
    tls_cert: Annotated[Path | None, Help("Certificate in PEM, with its chain.")] = None
    tls_key: Annotated[Path | None, Help("Its private key; not needed if the certificate's file has it.")] = None

    def _problems(self) -> Iterator[str]:
        if self.tls_key and not self.tls_cert:
            yield "tls_key is given without tls_cert; give both"


def named_bundles(arguments: Sequence[str]) -> dict[str, Path]:
    """Parse `[NAME=]BUNDLE` arguments; the default name is the directory name.

    Raises:
        ConfigError: lists every name that is duplicated or not valid in a URL.
    """
    bundles: dict[str, Path] = {}
    problems = []
    for argument in arguments:
        named = _NAMED.fullmatch(argument)
        path = Path(named[2] if named else argument)
        name = named[1] if named else path.absolute().name
        if not _NAME.fullmatch(name):
            problems.append(f"name {shortened(name)} cannot stand in a URL; give another, as in NAME={argument}")
        elif name in bundles:
            problems.append(f"name {name} is taken by {bundles[name]}; give another, as in NAME={path}")
        else:
            bundles[name] = path
    raise_all(ConfigError, "serve", problems)
    return bundles
