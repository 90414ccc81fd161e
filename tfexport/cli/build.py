"""`tfexport trt`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import click

from tfexport.bundle.manifest import ENGINES
from tfexport.cli.options import PATH, field_option, json_option, sign_key_option, trusted_keys_option
from tfexport.cli.process import says_whether_written
from tfexport.cli.terminal import build_progress, print_result, report_line
from tfexport.tensorrt.config import EngineConfig, Target


def _target(_context: click.Context, _parameter: click.Parameter, value: str) -> str | None:
    return None if value == "auto" else value


@click.command()
@click.argument("bundle", type=PATH)
@field_option(EngineConfig, "target", type=click.Choice(["auto", *get_args(Target)]), default="auto", callback=_target)
@field_option(EngineConfig, "form", type=click.Choice(["static", "concat"]))
@field_option(EngineConfig, "precision")
@field_option(EngineConfig, "weights")
@field_option(EngineConfig, "max_batch")
@field_option(EngineConfig, "max_source_length")
@field_option(EngineConfig, "max_target_length")
@field_option(EngineConfig, "capacities")
@field_option(EngineConfig, "min_shapes", "--minShapes")
@field_option(EngineConfig, "opt_shapes", "--optShapes")
@field_option(EngineConfig, "max_shapes", "--maxShapes")
@field_option(EngineConfig, "workspace_mib", "--workspace")
@field_option(EngineConfig, "builder_optimization_level")
@field_option(EngineConfig, "timing_cache")
@field_option(EngineConfig, "version_compatible")
@field_option(EngineConfig, "hardware_compatibility", "--hardware-compatibility-level")
@field_option(EngineConfig, "compute_capabilities", "--compute-capability")
@click.option("--dry-run", is_flag=True, help="Show profiles, memory and flags; build and write nothing.")
@sign_key_option
@trusted_keys_option
@click.option("--force", is_flag=True, help="Replace an engine that is there, once the new one is whole.")
@json_option
def trt(
    bundle: Path,
    dry_run: bool,
    sign_key: Path | None,
    trusted_keys: tuple[Path, ...],
    force: bool,
    as_json: bool,
    **config: Any,
) -> None:
    """Build TensorRT engines from BUNDLE and put them into it.

    An engine is named by target, form, precision and weights, and lies in engines/ of the bundle.
    """
    settings = EngineConfig(**config)
    from tfexport.tensorrt.pipeline import build_engines, estimate_engines

    if dry_run:
        estimate = estimate_engines(bundle, settings, trusted_keys=trusted_keys or None, report=report_line)
        print_result(estimate.to_dict(), estimate.lines(), as_json)
        return
    with says_whether_written(bundle / ENGINES):
        with build_progress() as (report, on_progress):
            built = build_engines(
                bundle,
                settings,
                force=force,
                sign_key=sign_key,
                trusted_keys=trusted_keys or None,
                report=report,
                on_progress=on_progress,
            )
        print_result(built.to_dict(), built.lines(), as_json)
