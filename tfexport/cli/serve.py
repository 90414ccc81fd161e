"""`tfexport serve`."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any, TypeVar

import click

from tfexport.cli.commands import EXIT_ERROR
from tfexport.cli.options import field_option, loading_options
from tfexport.errors import printable
from tfexport.serve.config import HttpConfig, ServerConfig, ServingConfig, named_bundles

C = TypeVar("C", ServingConfig, HttpConfig, ServerConfig)
_LEVELS = ["debug", "info", "warning", "error"]


@click.command()
@click.argument("bundles", nargs=-1, required=True, metavar="[NAME=]BUNDLE...")
@field_option(ServerConfig, "host")
@field_option(ServerConfig, "port")
@loading_options
@field_option(ServingConfig, "slots")
@field_option(ServingConfig, "encoder_budget")
@field_option(ServingConfig, "max_waiting")
@field_option(ServingConfig, "max_waiting_tokens")
@field_option(ServingConfig, "max_num_beams")
@field_option(HttpConfig, "max_timeout_s", "--timeout")
@field_option(HttpConfig, "max_body_bytes", "--max-body")
@field_option(ServerConfig, "max_connections")
@field_option(ServerConfig, "drain_delay_s", "--drain-delay")
@field_option(ServerConfig, "shutdown_timeout_s", "--shutdown-timeout")
@field_option(ServerConfig, "token_file")
@field_option(ServerConfig, "tls_cert")
@field_option(ServerConfig, "tls_key")
@field_option(HttpConfig, "completions")
@field_option(HttpConfig, "translate")
@field_option(HttpConfig, "ui", "--ui/--no-ui")
@click.option("--log-level", type=click.Choice(_LEVELS), default="info", help="Least that is logged to standard error.")
@click.option("--access-log", is_flag=True, help="Log every request.")
def serve(
    bundles: tuple[str, ...],
    loading: dict[str, Any],
    log_level: str,
    access_log: bool,
    **options: Any,
) -> None:
    """Serve each BUNDLE over HTTP, under NAME or the name of its directory, until SIGTERM or Ctrl-C.

    SIGHUP replaces every bundle by what its path holds now.
    """
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=log_level.upper())
    if log_level != "debug":  # uvicorn tells of each start, stop and malformed request
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    from tfexport.serve.server import serve_bundles

    done = serve_bundles(
        named_bundles(bundles),
        _config(ServerConfig, options),
        serving=_config(ServingConfig, options),
        http=_config(HttpConfig, options),
        report=lambda line: click.echo(printable(line)),
        access_log=access_log,
        **loading,
    )
    click.get_current_context().exit(0 if done else EXIT_ERROR)


def _config(kind: type[C], options: dict[str, Any]) -> C:
    """Make a configuration of those options that are fields of it."""
    return kind(**{field.name: options[field.name] for field in dataclasses.fields(kind) if field.name in options})
