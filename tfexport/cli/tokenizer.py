"""`tfexport tokenizer`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from tfexport.cli.options import IDS, PATH, sign_key_option, trusted_keys_option
from tfexport.cli.process import says_whether_written
from tfexport.cli.terminal import report_line
from tfexport.errors import printable


@click.command()
@click.argument("bundle", type=PATH)
@click.option(
    "--tokenizer", type=PATH, help="tokenizer.json, SentencePiece model, list of tokens, or Hugging Face directory."
)
@click.option("--target-tokenizer", type=PATH, help="The target's own.")
@click.option("--source-prefix", type=IDS, help="Ids before what the tokenizer makes of a source; '' for none.")
@click.option("--source-suffix", type=IDS, help="Ids behind it; '' for none.")
@click.option("--target-prefix", type=IDS, help="Ids that every target begins with, behind the start; '' for none.")
@click.option("--source-language", help="Of the texts that go in, as the tokenizer names it, such as eng_Latn.")
@sign_key_option
@trusted_keys_option
def tokenizer(
    bundle: Path,
    tokenizer: Path | None,
    target_tokenizer: Path | None,
    sign_key: Path | None,
    trusted_keys: tuple[Path, ...],
    **config: Any,
) -> None:
    """Replace the tokenizer of BUNDLE, or what surrounds its ids, without a new export.

    Recorded texts are compared anew. The bundle is replaced whole, or stays as it was.
    """
    with says_whether_written(bundle):
        from tfexport.retokenize import TokenizerConfig, replace_tokenizer

        changed = replace_tokenizer(
            bundle,
            TokenizerConfig(**config),
            tokenizer=tokenizer,
            target_tokenizer=target_tokenizer,
            sign_key=sign_key,
            trusted_keys=trusted_keys or None,
            report=report_line,
        )
        click.echo(printable(f"{bundle}: {changed.manifest.text.proof}"))
