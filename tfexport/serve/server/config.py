"""Where and how the server runs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from tfexport.config import Config, Ge, Help, Le


class ServerConfig(Config, subject="server"):
    """The server's address, how it stops, and who may send requests."""

    host: Annotated[str, Help("Address to listen on; 0.0.0.0 is all of the machine.")] = "127.0.0.1"
    port: Annotated[int, Ge(0), Le(65_535), Help("Port to listen on; 0 takes one that is free.")] = 8000
    max_connections: Annotated[int, Ge(1), Le(1_000_000), Help("Connections open at once; more are closed.")] = 1000
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
