"""`tfexport triton`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from tfexport.cli.options import (
    PATH,
    backend_option,
    device_option,
    engine_option,
    form_option,
    threads_option,
    trusted_keys_option,
)
from tfexport.cli.process import says_whether_written
from tfexport.cli.terminal import report_line
from tfexport.errors import printable
from tfexport.serve.config import ServingConfig
from tfexport.serve.protocol.limits import Limits


@click.command()
@click.argument("bundles", nargs=-1, required=True, metavar="[NAME=]BUNDLE...")
@click.option("--output", type=PATH, required=True, help="Model repository to write.")
@backend_option
@form_option
@device_option
@engine_option
@threads_option
@trusted_keys_option
@click.option("--slots", default=ServingConfig.slots, help="Rows of each model that are decoded at once.")
@click.option("--max-waiting", default=ServingConfig.max_waiting, help="Requests of each model that may wait.")
@click.option("--max-num-beams", default=ServingConfig.max_num_beams, help="Beams of a request at most.")
@click.option(
    "--timeout", "timeout_s", default=Limits.max_timeout_s, help="Seconds that a request may wait, and then may take."
)
@click.option("--stream/--no-stream", default=True, help="Add NAME_stream, which streams, and loads the bundle again.")
@click.option("--force", is_flag=True, help="Replace a repository that tfexport wrote.")
def triton(
    bundles: tuple[str, ...],
    output: Path,
    trusted_keys: tuple[Path, ...],
    slots: int,
    max_waiting: int,
    max_num_beams: int,
    timeout_s: float,
    **options: Any,
) -> None:
    """Write a model repository for Triton Inference Server, with each BUNDLE under NAME or that of its directory."""
    with says_whether_written(output):
        from tfexport.integrations.triton.repository import write_repository
        from tfexport.serve.bundles import named_bundles

        write_repository(
            named_bundles(bundles),
            output,
            serving=ServingConfig(slots=slots, max_waiting=max_waiting, max_num_beams=max_num_beams),
            limits=Limits(max_timeout_s=timeout_s),
            trusted_keys=trusted_keys or None,
            report=report_line,
            **options,
        )
        click.echo(printable(f"{output}: serve it with tritonserver --model-repository {output}"))
