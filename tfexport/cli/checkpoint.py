"""`tfexport import`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from tfexport.cli.options import IDS, PATH
from tfexport.cli.process import says_whether_written
from tfexport.cli.terminal import stage_progress
from tfexport.errors import printable
from tfexport.importing.config import ImportConfig


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
