"""`tfexport verify`."""

from __future__ import annotations

from pathlib import Path

import click

from tfexport.cli.commands import EXIT_PARITY
from tfexport.cli.options import PATH, device_option, engine_option, json_option, trusted_keys_option
from tfexport.cli.terminal import print_result, report_line
from tfexport.contract import Device
from tfexport.runtime.registry import comparable

_NAMES = [backend.name for backend in comparable()]


@click.command()
@click.argument("bundle", type=PATH)
@click.option("--against", metavar="SOURCE", help="Model directory or PACKAGE.MODULE:FACTORY that it was made from.")
@click.option("--samples", default=100, help="Random sequences to decode for each form and method.")
@click.option("--seed", default=0, help="Of the sequences.")
@click.option("--backend", type=click.Choice(_NAMES), default=_NAMES[0], help="Compare the graphs, or an engine.")
@engine_option
@device_option
@trusted_keys_option
@json_option
def verify(
    bundle: Path,
    against: str | None,
    samples: int,
    seed: int,
    backend: str,
    engine: str | None,
    device: Device,
    trusted_keys: tuple[Path, ...],
    as_json: bool,
) -> None:
    """Compare every stage of BUNDLE with PyTorch; exit with 2 when one differs."""
    from tfexport.verify import VerifyConfig, verify_bundle

    config = VerifyConfig(samples=samples, seed=seed)
    result = verify_bundle(
        bundle,
        against=against,
        config=config,
        backend=backend,
        device=device,
        engine=engine,
        trusted_keys=trusted_keys or None,
        report=report_line,
    )
    print_result(result.to_dict(), result.lines(), as_json)
    click.get_current_context().exit(0 if result.passed else EXIT_PARITY)
