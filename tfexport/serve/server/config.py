"""Where and how the server runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tfexport.fields import Config


class ServerConfig(Config, subject="server"):
    """The server's address, how it stops, and who may ask.

    Attributes:
        host: address to listen on; 0.0.0.0 for all of the machine.
        port: to listen on; 0 for one that is free.
        max_connections: open at once; who comes beyond is closed.
        drain_delay_s: seconds after SIGTERM in which the server says that it is not ready and still takes requests.
        shutdown_timeout_s: seconds in which requests that were accepted are finished after that.
        token_file: file with one bearer token a line; None lets everybody ask.
        tls_cert: file of the certificate, its chain included, in PEM.
        tls_key: file of its private key; None where the certificate's file has it.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    max_connections: int = 1000
    drain_delay_s: float = 0.0
    shutdown_timeout_s: float = 30.0
    token_file: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None

    def _problems(self) -> Iterator[str]:
        between = {
            "port": (0, 65_535),
            "max_connections": (1, 1_000_000),
            "drain_delay_s": (0, 3600),
            "shutdown_timeout_s": (0, 86_400),
        }
        for name, (low, high) in between.items():
            if not low <= (value := getattr(self, name)) <= high:
                yield f"{name} is {value}, expected {low} to {high}"
        if self.tls_key and not self.tls_cert:
            yield "tls_key is given without tls_cert; give both"
