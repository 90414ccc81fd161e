"""`tfexport onnx`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import click

from tfexport.bundle.identity import Identity
from tfexport.cli.options import PATH, CommaList, sign_key_option
from tfexport.cli.process import says_whether_written
from tfexport.cli.terminal import report_line
from tfexport.errors import printable
from tfexport.graph.config import ExportConfig
from tfexport.spec import CONCAT_OPSETS, AlignmentHeads, Form


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
@click.option(
    "--precision",
    type=click.Choice(["fp32", "fp16", "bf16", "int8", "int4"]),
    default=ExportConfig.precision,
    help="Of the weights; int8 and int4 are for ONNX Runtime on the CPU.",
)
@click.option(
    "--optimize-for",
    type=click.Choice(["latency", "throughput"]),
    default=ExportConfig.optimize_for,
    help="What int8 is fast at: up to some 16 texts at once, or large batches.",
)
@click.option(
    "--forms",
    type=CommaList(click.Choice(get_args(Form))),
    default=",".join(ExportConfig.forms),
    help="Of the decoder: concat is portable, static is for engines and GPUs, contrib is for ONNX Runtime on the CPU.",
)
@click.option(
    "--opset",
    type=click.IntRange(CONCAT_OPSETS[0], CONCAT_OPSETS[-1]),
    default=ExportConfig.opset,
    help="Of the encoder and all forms but static.",
)
@click.option("--max-source-length", type=int, help="Most source tokens; the model's limit when not given.")
@click.option("--max-target-length", type=int, help="Most target tokens; the model's limit when not given.")
@click.option(
    "--alignment",
    type=HeadsOption(),
    help="Write cross-attention as alignment too: of this decoder layer, from 0 or -1 for the last, the mean of these "
    "heads, or of all when none is named.",
)
@click.option("--loop", is_flag=True, help="Write one graph too that decodes greedily by itself: ids in, ids out.")
@click.option(
    "--speculation", is_flag=True, help="Let one step verify several tokens of a single text that copies or repeats."
)
@click.option("--seed", default=ExportConfig.seed, help="Of a preset's random weights.")
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
