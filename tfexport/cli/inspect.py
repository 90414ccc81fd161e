"""`tfexport inspect` and `tfexport doctor`: what a path holds, and what a machine has."""

from __future__ import annotations

from pathlib import Path

import click

from tfexport.cli.commands import EXIT_ERROR
from tfexport.cli.options import PATH, json_option, trusted_keys_option
from tfexport.cli.terminal import print_result


@click.command()
@click.argument("path", type=PATH)
@trusted_keys_option
@click.option(
    "--untrusted", is_flag=True, help="Read it in a process with bounded memory and time that can write nothing."
)
@json_option
def inspect(path: Path, trusted_keys: tuple[Path, ...], untrusted: bool, as_json: bool) -> None:
    """Show what a bundle, a model directory or an .onnx file holds."""
    from tfexport.describe import describe, inspect_path
    from tfexport.sandbox import inspect_untrusted

    if untrusted:
        found = inspect_untrusted(path, trusted_keys=trusted_keys)
    else:
        found = inspect_path(path, trusted_keys=trusted_keys or None)
    print_result(found, describe(found), as_json)


@click.command()
@json_option
def doctor(as_json: bool) -> None:
    """Show what is installed, which backends work and how to repair the rest; exit with 1 when none works."""
    from tfexport.doctor import diagnose

    found = diagnose()
    print_result(found.to_dict(), found.lines(), as_json)
    click.get_current_context().exit(0 if found.works else EXIT_ERROR)
