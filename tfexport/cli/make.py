"""Commands that write something: `import`, `trim`, `onnx`, `trt` and `triton`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, get_args

import click

from tfexport.bundle.manifest import ENGINES, Identity
from tfexport.cli.commands import EXIT_PARITY, main, reports_whether_written
from tfexport.cli.options import (
    INPUT,
    PATH,
    CommaList,
    DeviceType,
    config_of,
    config_options,
    json_option,
    loading_options,
    sign_key_option,
    trusted_keys_option,
)
from tfexport.cli.terminal import inputs_of, print_result, report_line, stage_progress
from tfexport.contract import CONCAT_OPSETS, AlignmentHeads
from tfexport.errors import printable
from tfexport.export.config import ExportConfig
from tfexport.importing.config import ImportConfig
from tfexport.serve.config import Limits, ServingConfig, named_bundles
from tfexport.tensorrt.config import OPTION_NAMES, EngineConfig, Target


@main.command("import")
@click.argument("checkpoint", type=PATH)
@click.option("--output", type=PATH, required=True, help="Model directory to write.")
@click.option(
    "--reference", type=PATH, help="Reference outputs of the original model, from `tfexport.record_reference`."
)
@config_options(
    ImportConfig,
    settings={"name": "--set", "metavar": "KEY=VALUE"},
    labels={"type": CommaList(click.STRING), "multiple": False},
)
@click.option(
    "--tokenizer", type=PATH, help="tokenizer.json, SentencePiece model, vocabulary, or Hugging Face directory."
)
@click.option("--target-tokenizer", type=PATH, help="Tokenizer of the target, if --tokenizer is only for the source.")
@click.option("--force", is_flag=True, help="Replace an existing model directory once the new one is complete.")
def import_(checkpoint: Path, output: Path, **options: Any) -> None:
    """Import CHECKPOINT, the weights of another implementation, as a model directory.

    CHECKPOINT is a safetensors file, sharded or not, a file of torch.save, a folder of Lightning or accelerate, or a
    Hugging Face directory of Marian, BART, T5 or a similar family, also OWNER/NAME[@REVISION] on the Hub. With
    --reference the import is accepted only if it reproduces the outputs of the original.
    """
    settings = config_of(ImportConfig, options)
    files = {name: options[name] for name in ("reference", "tokenizer", "target_tokenizer", "force")}
    with reports_whether_written(output):
        from tfexport.importing.importer import import_checkpoint

        with stage_progress() as (report, on_progress):
            imported = import_checkpoint(checkpoint, output, settings, report=report, on_progress=on_progress, **files)
        click.echo(printable(f"{output}: {imported.summary()}"))
        for line in imported.certificate.unverified:
            click.echo(printable(f"unverified: {line}"))


def _heads(value: str) -> AlignmentHeads:
    layer, colon, heads = value.partition(":")
    try:
        return AlignmentHeads(layer=int(layer), heads=tuple(map(int, heads.split(","))) if colon else ())
    except ValueError as error:
        remedy = "write 1 for all heads of layer 1, or 1:0,2"
        raise click.BadParameter(f"{value!r} is not a layer and heads; {remedy}") from error


@main.command()
@click.argument("model", type=PATH)
@click.option("--output", type=PATH, required=True, help="Model directory to write.")
@click.option("--corpus", type=INPUT, required=True, help="Texts, one a line; a tab may separate a target to keep.")
@click.option("--keep", type=INPUT, help="More tokens to keep, one a line, spelled as in the tokenizer.")
@click.option("--force", is_flag=True, help="Replace an existing model directory once the new one is complete.")
@json_option
def trim(model: Path, output: Path, corpus: Path, keep: Path | None, force: bool, as_json: bool) -> None:
    """Copy the model directory MODEL without tokens that your texts do not need.

    It keeps the tokens of the corpus and of the model's outputs for it, special tokens, and bytes and single
    characters. If a text of the corpus is encoded differently or has another output, nothing is written.
    """
    pairs = [line.partition("\t")[::2] for line in inputs_of((), corpus)]
    tokens = inputs_of((), keep) if keep else []
    with reports_whether_written(output):
        from tfexport.trim import trim_model

        found = trim_model(model, output, pairs, keep=tokens, force=force, report=report_line)
        print_result(found.to_dict(), found.lines(), as_json)


@main.command()
@click.argument("source")
@click.option("--output", type=PATH, required=True, help="Bundle directory to write.")
@config_options(
    ExportConfig,
    opset={"type": click.IntRange(CONCAT_OPSETS[0], CONCAT_OPSETS[-1])},
    alignment={"type": _heads, "metavar": "LAYER[:HEAD,…]"},
)
@click.option("--verify/--no-verify", default=True, help="Compare every stage with PyTorch before writing.")
@click.option("--name", help="Name of the model, for the manifest.")
@click.option("--model-version", "version", help="Version of the model, in your own numbering, for the manifest.")
@click.option("--license", help="License of the weights, such as Apache-2.0, for the manifest.")
@click.option("--date", help="Date for the manifest, YYYY-MM-DD; by default it has none.")
@click.option(
    "--calibration-data",
    type=INPUT,
    help="Texts to calibrate w8a8 and fp8 with, one a line; by default the recorded texts.",
)
@sign_key_option
@click.option("--force", is_flag=True, help="Replace an existing bundle once the new one is complete.")
def onnx(source: str, output: Path, **options: Any) -> None:
    """Export SOURCE as a bundle of ONNX graphs.

    SOURCE is a model directory (config.json, model.safetensors, optional tokenizer.json), preset:NAME, or
    PACKAGE.MODULE:FACTORY for a module of your own, whose code is imported and run.
    """
    settings, identity = config_of(ExportConfig, options), config_of(Identity, options)
    others = {name: options[name] for name in ("verify", "force", "sign_key")}
    data = options["calibration_data"]
    texts = inputs_of((), data) if data else ()
    with reports_whether_written(output):
        from tfexport.export import export_bundle

        bundle = export_bundle(
            source, output, settings, identity=identity, calibration_texts=texts, report=report_line, **others
        )
        manifest = bundle.manifest
        text = f", {manifest.text.proof}" if manifest.has_tokenizer else ""
        click.echo(printable(f"{output}: {manifest.kind}, {settings.precision}{text}"))
        click.echo(printable(str(manifest.proof)))


@main.command()
@click.argument("bundle", type=PATH)
@config_options(
    EngineConfig,
    target={
        "type": click.Choice(["auto", *get_args(Target)]),
        "default": "auto",
        "callback": lambda _context, _parameter, value: None if value == "auto" else value,
    },
    variant={"type": click.Choice(["static", "concat"])},
    **OPTION_NAMES,
)
@click.option(
    "--device",
    type=DeviceType(),
    metavar="cuda|cuda:N",
    help="GPU to build on; by default the first one, or none for tensorrt-rtx if there is none.",
)
@click.option("--dry-run", is_flag=True, help="Show profiles, memory and flags; build and write nothing.")
@click.option(
    "--save-graphs",
    type=PATH,
    metavar="DIR",
    help="Write the graphs to a new folder instead of building, with inputs and commands of trtexec and Polygraphy.",
)
@click.option(
    "--debug",
    is_flag=True,
    help="Build nothing, but compare every stage with float32 and find layers for --fp32-layers; exit with 2 if one "
    "differs.",
)
@click.option("--input", "source", type=INPUT, help="Texts for --save-graphs and --debug, one a line.")
@sign_key_option
@trusted_keys_option
@click.option("--force", is_flag=True, help="Replace an existing engine once the new one is complete.")
@json_option
def trt(bundle: Path, save_graphs: Path | None, source: Path | None, as_json: bool, **options: Any) -> None:
    """Build TensorRT engines from BUNDLE and put them into it.

    An engine is named after target, variant, precision and weights, and is stored in engines/ of the bundle.
    """
    settings = config_of(EngineConfig, options)
    where = {"device": options["device"], "trusted_keys": options["trusted_keys"]}
    from tfexport.tensorrt.pipeline import build_engines, estimate_engines

    if sum(map(bool, (save_graphs, options["debug"], options["dry_run"]))) > 1:
        raise click.UsageError("--save-graphs, --debug and --dry-run exclude each other; give one of them.")
    if source and not (save_graphs or options["debug"]):
        raise click.UsageError(
            "--input gives texts to --save-graphs and --debug; add one of them or leave --input out."
        )
    texts = inputs_of((), source) if source else ()
    if save_graphs:
        from tfexport.debug.save import save_graphs as save

        saved = save(bundle, save_graphs, settings, texts=texts, **where, report=report_line)
        print_result(saved.to_dict(), saved.lines(), as_json)
        return
    if options["debug"]:
        from tfexport.debug.accuracy import diagnose

        diagnosis = diagnose(bundle, settings, texts=texts, **where, report=report_line)
        print_result(diagnosis.to_dict(), diagnosis.lines(), as_json)
        click.get_current_context().exit(0 if diagnosis.agrees else EXIT_PARITY)
    if options["dry_run"]:
        estimate = estimate_engines(bundle, settings, **where, report=report_line)
        print_result(estimate.to_dict(), estimate.lines(), as_json)
        return
    with reports_whether_written(bundle / ENGINES):
        with stage_progress() as (report, on_progress):
            others: dict[str, Any] = {"force": options["force"], "sign_key": options["sign_key"], **where}
            built = build_engines(
                bundle, settings, report=report, on_progress=partial(on_progress, "building"), **others
            )
        print_result(built.to_dict(), built.lines(), as_json)


@main.command()
@click.argument("bundles", nargs=-1, required=True, metavar="[NAME=]BUNDLE...")
@click.option("--output", type=PATH, required=True, help="Model repository to write.")
@loading_options
@config_options(ServingConfig, "slots", "max_waiting", "max_num_beams")
@config_options(Limits, "max_timeout_s", max_timeout_s="--timeout")
@click.option("--stream/--no-stream", default=True, help="Add NAME_stream, which streams, and loads the bundle again.")
@click.option("--force", is_flag=True, help="Replace a repository that tfexport wrote.")
def triton(
    bundles: tuple[str, ...], output: Path, loading: dict[str, Any], stream: bool, force: bool, **options: Any
) -> None:
    """Write a model repository of the BUNDLEs for Triton Inference Server.

    A model is named NAME, or after the directory of its bundle.
    """
    with reports_whether_written(output):
        from tfexport.integrations.triton.repository import write_repository

        write_repository(
            named_bundles(bundles),
            output,
            serving=config_of(ServingConfig, options),
            limits=config_of(Limits, options),
            **loading,
            report=report_line,
            stream=stream,
            force=force,
        )
        click.echo(printable(f"{output}: serve it with tritonserver --model-repository {output}"))
