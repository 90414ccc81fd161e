#!/usr/bin/env python
"""Write the tables and the plot of a result of side_by_side.py: NAME.md and NAME.svg beside NAME.json.

They are made from the result alone, and take the place of those made from it before.
"""

from __future__ import annotations

from pathlib import Path

import click
from comparison import markdown, picture
from comparison.result import pairs, read

from tfexport.errors import TfexportError


@click.command(help=__doc__)
@click.argument("result", type=click.Path(path_type=Path))
def main(result: Path) -> None:
    try:
        document = read(result)
    except TfexportError as error:
        raise click.ClickException(str(error)) from error
    tables = result.with_suffix(".md")
    tables.write_text(markdown.render(document) + "\n", encoding="utf-8")
    click.echo(tables)
    if pairs(document):
        plot = result.with_suffix(".svg")
        plot.write_text(picture.draw(document), encoding="utf-8")
        click.echo(plot)


if __name__ == "__main__":
    main()
