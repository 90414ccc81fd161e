"""Define the command `serve`."""

from __future__ import annotations

import logging
import sys
from functools import partial
from typing import Any

import click

from tfexport.cli.commands import EXIT_ERROR, main
from tfexport.cli.options import DeviceType, config_of, config_options, loading_options
from tfexport.errors import printable
from tfexport.serve.config import HttpConfig, ServerConfig, ServingConfig, named_bundles


@main.command()
@click.argument("bundles", nargs=-1, required=True, metavar="[NAME=]BUNDLE...")
@partial(
    loading_options,
    device=click.option(
        "--device",
        type=DeviceType(several=True),
        default="cpu",
        help="Where the models run; with several devices, such as cuda:0,cuda:1, each loads them.",
    ),
)
@config_options(ServerConfig, drain_delay_s="--drain-delay", shutdown_timeout_s="--shutdown-timeout")
@config_options(ServingConfig, "slots", "encoder_budget", "max_waiting", "max_waiting_tokens", "max_num_beams")
@config_options(HttpConfig, "max_timeout_s", "max_body_bytes", max_timeout_s="--timeout", max_body_bytes="--max-body")
@config_options(HttpConfig, "max_upload_bytes", max_upload_bytes="--max-upload")
@config_options(HttpConfig, "completions", "translate", "ui")
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    help="Lowest level of messages that are logged to standard error.",
)
@click.option("--access-log", is_flag=True, help="Log every request.")
def serve(bundles: tuple[str, ...], loading: dict[str, Any], log_level: str, access_log: bool, **options: Any) -> None:
    """Serve BUNDLEs over HTTP until SIGTERM or Ctrl-C.

    A model is named NAME, or after the directory of its bundle. SIGHUP loads every bundle again from its path, except
    on Windows.
    """
    config = config_of(ServerConfig, options)
    process = "[%(process)d] " if config.processes > 1 else ""
    logging.basicConfig(format=f"%(asctime)s %(levelname)s {process}%(message)s", level=log_level.upper())
    if log_level != "debug":  # they log each start, stop and malformed request
        for name in ("uvicorn.error", "python_multipart"):
            logging.getLogger(name).setLevel(logging.ERROR)
    from tfexport.serve.server import Server

    kind = Server
    if sys.platform == "linux" and config.processes > 1:  # the configuration refuses several elsewhere
        from tfexport.serve._processes import Processes

        kind = Processes
    server = kind(
        named_bundles(bundles),
        config,
        serving=config_of(ServingConfig, options),
        http=config_of(HttpConfig, options),
        report=lambda line: click.echo(printable(line)),
        access_log=access_log,
        **loading,
    )
    click.get_current_context().exit(0 if server.run() else EXIT_ERROR)
