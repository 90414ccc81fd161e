"""Commands that write something: `tfexport import`, `onnx`, `trt` and `triton`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import click

from tfexport.bundle.manifest import ENGINES, Identity
from tfexport.cli.options import (
    IDS,
    PATH,
    field_option,
    json_option,
    loading_options,
    sign_key_option,
    trusted_keys_option,
)
from tfexport.cli.process import says_whether_written
from tfexport.cli.terminal import build_progress, print_result, report_line, stage_progress
from tfexport.contract import CONCAT_OPSETS, AlignmentHeads
from tfexport.errors import printable
from tfexport.export.config import ExportConfig
from tfexport.importing.config import ImportConfig
from tfexport.serve.config import Limits, ServingConfig, named_bundles
from tfexport.tensorrt.config import EngineConfig, Target


@click.command("import")
@click.argument("checkpoint", type=PATH)
@click.option("--output", type=PATH, required=True, help="Model directory to make.")
@click.option(
    "--layout", default=ImportConfig.layout, help="auto, the name of a built-in layout, or a layout file (YAML)."
)
@click.option("--entry", metavar="NAME", help="Of several state dicts in a file the one that is meant, such as ema.")
@click.option("--golden", type=PATH, help="What the original model computes, as recorded beside its code.")
@click.option("--heads", type=click.IntRange(min=1), help="Attention heads, which no shape tells.")
@click.option(
    "--set", "settings", multiple=True, metavar="KEY=VALUE", help="A switch or token id, such as norm_eps=1e-6."
)
@click.option(
    "--tokenizer", type=PATH, help="tokenizer.json, SentencePiece model, list of tokens, or Hugging Face directory."
)
@click.option("--target-tokenizer", type=PATH, help="The target's own, where --tokenizer is the source's alone.")
@click.option("--source-prefix", type=IDS, default="", help="Ids before what the tokenizer makes of a source.")
@click.option("--source-suffix", type=IDS, default="", help="Ids behind it, such as the end token.")
@click.option("--target-prefix", type=IDS, default="", help="Ids that every target begins with, behind the start.")
@click.option("--source-language", help="Of the texts that go in, as the tokenizer names it, such as eng_Latn.")
@click.option("--target-language", help="Of the texts that come out, unless a call names another.")
@click.option("--builtin/--no-builtin", default=ImportConfig.builtin, help="Let auto propose the built-in layouts.")
@click.option(
    "--search-budget",
    type=click.IntRange(min=1),
    default=ImportConfig.search_budget,
    help="Candidates that auto runs at most: a mapping of the keys with a value of every switch each.",
)
@click.option("--accept-unverified", is_flag=True, help="Take what auto proposes without a golden.")
@click.option("--force", is_flag=True, help="Replace a model directory that is there, once the new one is whole.")
def import_(
    checkpoint: Path,
    output: Path,
    golden: Path | None,
    tokenizer: Path | None,
    target_tokenizer: Path | None,
    force: bool,
    **config: Any,
) -> None:
    """Import CHECKPOINT, the weights of another implementation, as a model directory.

    CHECKPOINT is a state dict in a safetensors file, sharded or not, or a file of torch.save, a folder of Lightning or
    accelerate, or a Hugging Face directory of Marian, BART, T5 or their kin. With --golden the import is accepted only
    when the original's outputs are reproduced.
    """
    settings = ImportConfig(**config)
    with says_whether_written(output):
        from tfexport.importing.importer import import_checkpoint

        with stage_progress() as (report, on_progress):
            imported = import_checkpoint(
                checkpoint,
                output,
                settings,
                golden=golden,
                tokenizer=tokenizer,
                target_tokenizer=target_tokenizer,
                force=force,
                report=report,
                on_progress=on_progress,
            )
        click.echo(printable(f"{output}: {imported.summary()}"))
        for line in imported.certificate.unverified:
            click.echo(printable(f"unverified: {line}"))


class HeadsOption(click.ParamType):  # type: ignore[type-arg]  # not generic before click 8.4
    """A layer, and behind a colon heads with commas between them."""

    name = "layer[:head,…]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> AlignmentHeads:
        """Read one value."""
        if isinstance(value, AlignmentHeads):
            return value
        layer, colon, heads = value.partition(":")
        try:
            return AlignmentHeads(layer=int(layer), heads=tuple(map(int, heads.split(","))) if colon else ())
        except ValueError:
            self.fail(f"{value!r} is not a layer and heads; write 1 for all heads of layer 1, or 1:0,2", param, ctx)


@click.command()
@click.argument("source")
@click.option("--output", type=PATH, required=True, help="Bundle directory to make.")
@field_option(ExportConfig, "precision")
@field_option(ExportConfig, "optimize_for")
@field_option(ExportConfig, "forms", default=",".join(ExportConfig.forms), show_default=True)
@field_option(ExportConfig, "opset", type=click.IntRange(CONCAT_OPSETS[0], CONCAT_OPSETS[-1]))
@field_option(ExportConfig, "max_source_length")
@field_option(ExportConfig, "max_target_length")
@click.option(
    "--alignment",
    type=HeadsOption(),
    help="Write cross-attention as alignment too: of this decoder layer, from 0 or -1 for the last, the mean of these "
    "heads, or of all when none is named.",
)
@field_option(ExportConfig, "speculation")
@field_option(ExportConfig, "seed")
@click.option("--verify/--no-verify", default=True, help="Compare every stage with PyTorch before writing.")
@click.option("--name", help="Of the model, for the manifest.")
@click.option("--model-version", "version", help="Of the model, in numbers of your own, for the manifest.")
@click.option("--license", help="Of the weights, such as Apache-2.0, for the manifest.")
@click.option("--date", help="YYYY-MM-DD for the manifest, which has none otherwise.")
@sign_key_option
@click.option("--force", is_flag=True, help="Replace a bundle that is there, once the new one is whole.")
def onnx(
    source: str,
    output: Path,
    verify: bool,
    force: bool,
    sign_key: Path | None,
    name: str | None,
    version: str | None,
    license: str | None,  # noqa: A002 - as the option is called
    date: str | None,
    **config: Any,
) -> None:
    """Export SOURCE as a bundle of ONNX graphs.

    SOURCE is a model directory (config.json, model.safetensors, optional tokenizer.json), preset:NAME, or
    PACKAGE.MODULE:FACTORY for a module of your own, whose code is imported and run.
    """
    settings = ExportConfig(**config)
    identity = Identity(name=name, version=version, license=license, date=date)
    with says_whether_written(output):
        from tfexport.export import export_bundle

        bundle = export_bundle(
            source,
            output,
            settings,
            identity=identity,
            verify=verify,
            force=force,
            sign_key=sign_key,
            report=report_line,
        )
        manifest, proof = bundle.manifest, "verified" if verify else "not verified"
        text = f", {manifest.text.proof}" if manifest.has_tokenizer else ""
        click.echo(printable(f"{output}: {manifest.kind}, {settings.precision}, {proof}{text}"))


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
    trusted_keys: tuple[Path, ...] | None,
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
        estimate = estimate_engines(bundle, settings, trusted_keys=trusted_keys, report=report_line)
        print_result(estimate.to_dict(), estimate.lines(), as_json)
        return
    with says_whether_written(bundle / ENGINES):
        with build_progress() as (report, on_progress):
            built = build_engines(
                bundle,
                settings,
                force=force,
                sign_key=sign_key,
                trusted_keys=trusted_keys,
                report=report,
                on_progress=on_progress,
            )
        print_result(built.to_dict(), built.lines(), as_json)


@click.command()
@click.argument("bundles", nargs=-1, required=True, metavar="[NAME=]BUNDLE...")
@click.option("--output", type=PATH, required=True, help="Model repository to write.")
@loading_options
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
    loading: dict[str, Any],
    slots: int,
    max_waiting: int,
    max_num_beams: int,
    timeout_s: float,
    stream: bool,
    force: bool,
) -> None:
    """Write a model repository for Triton Inference Server, with each BUNDLE under NAME or that of its directory."""
    with says_whether_written(output):
        from tfexport.integrations.triton.repository import write_repository

        write_repository(
            named_bundles(bundles),
            output,
            serving=ServingConfig(slots=slots, max_waiting=max_waiting, max_num_beams=max_num_beams),
            limits=Limits(max_timeout_s=timeout_s),
            **loading,
            report=report_line,
            stream=stream,
            force=force,
        )
        click.echo(printable(f"{output}: serve it with tritonserver --model-repository {output}"))
