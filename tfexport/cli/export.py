"""`tfexport onnx`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from tfexport.bundle.manifest import Identity
from tfexport.cli.options import PATH, field_option, sign_key_option
from tfexport.cli.process import says_whether_written
from tfexport.cli.terminal import report_line
from tfexport.contract import CONCAT_OPSETS, AlignmentHeads
from tfexport.errors import printable
from tfexport.export.config import ExportConfig


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
