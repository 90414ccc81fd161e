"""`tfexport onnx`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import click

from tfexport.cli.options import PATH, CommaList
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
    help="What int8 is fast at: single texts, which then depend on no other, or large batches.",
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
@click.option("--seed", default=ExportConfig.seed, help="Of a preset's random weights.")
@click.option("--verify/--no-verify", default=True, help="Compare every stage with PyTorch before writing.")
@click.option("--force", is_flag=True, help="Replace a bundle that is there, once the new one is whole.")
def onnx(source: str, output: Path, verify: bool, force: bool, **config: Any) -> None:
    """Export SOURCE as a bundle of ONNX graphs.

    SOURCE is a model directory (config.json, model.safetensors, optional tokenizer.json) or preset:NAME.
    """
    settings = ExportConfig(**config)
    from tfexport.export import export_bundle

    bundle = export_bundle(source, output, settings, verify=verify, force=force, report=report_line)
    manifest, proof = bundle.manifest, "verified" if verify else "not verified"
    text = f", {manifest.text.proof}" if manifest.has_tokenizer else ""
    click.echo(printable(f"{output}: {manifest.kind}, {settings.precision}, {proof}{text}"))
