"""`tfexport trt`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from tfexport.bundle.manifest import ENGINES
from tfexport.cli.options import PATH, CommaList, json_option, sign_key_option, trusted_keys_option
from tfexport.cli.process import says_whether_written
from tfexport.cli.terminal import build_progress, print_result, report_line
from tfexport.trt.config import EngineConfig


@click.command()
@click.argument("bundle", type=PATH)
@click.option(
    "--target",
    type=click.Choice(["auto", "tensorrt", "tensorrt-rtx"]),
    default="auto",
    callback=lambda _context, _parameter, value: None if value == "auto" else value,
    help="Library to build with; auto takes tensorrt where it is installed and a GPU is there, else tensorrt-rtx.",
)
@click.option(
    "--form",
    type=click.Choice(["static", "concat"]),
    help="Of the decoder; static where the library takes it of this model and the bundle has it when not given.",
)
@click.option("--precision", type=click.Choice(["fp32", "fp16", "bf16"]), help="The bundle's own when not given.")
@click.option(
    "--weights", type=click.Choice(["int8", "int4", "fp8"]), help="Store the matrices of linear maps in fewer bits."
)
@click.option("--max-batch", default=EngineConfig.max_batch, help="Most sources, and most hypotheses, at once.")
@click.option("--max-source-length", type=int, help="Most source tokens; the bundle's limit when not given.")
@click.option("--max-target-length", type=int, help="Most target tokens; the bundle's limit when not given.")
@click.option(
    "--capacities",
    type=CommaList(click.INT),
    default=(),
    show_default=False,
    help="Positions of the caches that decoders of the static form are built for besides max-target-length, such as "
    "128,512; each is one more decoder in device memory. Chosen when not given; max-target-length alone means one.",
)
@click.option("--minShapes", "min_shapes", default="", show_default=False, help="Smallest shapes, as in trtexec.")
@click.option("--optShapes", "opt_shapes", default="", show_default=False, help="Shapes to tune for, as in trtexec.")
@click.option("--maxShapes", "max_shapes", default="", show_default=False, help="Largest shapes, as in trtexec.")
@click.option("--workspace", "workspace_mib", type=int, help="Scratch memory of a layer in MiB.")
@click.option("--builder-optimization-level", type=int, help="0 to 5; higher builds longer for faster engines.")
@click.option("--timing-cache", help="Directory of kernel timings, read and written (tensorrt).")
@click.option("--version-compatible", is_flag=True, help="Let newer versions load the engines (tensorrt).")
@click.option(
    "--hardware-compatibility-level",
    "hardware_compatibility",
    type=click.Choice(["none", "ampere_plus", "same_compute_capability"]),
    default=EngineConfig.hardware_compatibility,
    help="Which other GPUs may run the engines (tensorrt).",
)
@click.option(
    "--compute-capability",
    "compute_capabilities",
    multiple=True,
    help="GPUs to build for, such as 8.9; may be given several times (tensorrt-rtx).",
)
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
    from tfexport.build import build_engines, estimate_engines

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
