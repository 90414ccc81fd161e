#!/usr/bin/env python
"""Decode beside other systems, on the same weights, in one run.

Every system runs in a process and an environment of its own: make those of the
peers with benchmarks/environments, or name a Python with --python, as for the
peer "revision", which is another tfexport. Outputs are compared before times.
Then all take turns, in seven rounds; a ratio is the median over rounds of the
peer's time over ours, of the whole call from token ids to token ids.
CTranslate2 runs with one thread and with one for each core, and the faster
counts.

The file is written after every setting, and --resume goes on with it. Tables
and a plot: python benchmarks/report.py FILE.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
from comparison import markdown
from comparison.processes import BENCHMARKS
from comparison.result import Result
from comparison.run import Selection, compare
from comparison.systems import FOREIGN, MODELS, OURS, PEERS, PRECISIONS, PRESETS, SYSTEMS, matrix
from comparison.weights import ConvertedWeights

from tfexport.cores import available_cores
from tfexport.errors import TfexportError

ENVIRONMENTS = BENCHMARKS.parent / "build" / "peers"
Option = Callable[[Callable[..., None]], Callable[..., None]]
ROUNDS, QUICK_ROUNDS = 7, 3


class Several(click.ParamType):  # type: ignore[type-arg]  # not generic before click 8.4
    """Values of one type with commas between them."""

    name = "value,…"

    def __init__(self, of: click.ParamType[Any]) -> None:
        """Take the type of one value."""
        self.of = of

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[Any]:
        """Split and convert; values that repeat count once."""
        words = value.split(",") if isinstance(value, str) else value
        return list(dict.fromkeys(self.of.convert(word, param, ctx) for word in words))

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """Name the values, where they are listed."""
        return ",".join(self.of.choices) if isinstance(self.of, click.Choice) else "N,…"


def pythons(given: Sequence[str]) -> dict[str, Path]:
    """Return the Python of every environment: that named on the command line, or the one that is made for it."""
    found = {system.environment: ENVIRONMENTS / system.environment / "bin" / "python" for system in SYSTEMS.values()}
    found[OURS] = Path(sys.executable)
    for setting in given:
        name, _, path = setting.partition("=")
        if name not in found or not path:
            raise click.BadParameter(f"{setting}: expected NAME=PATH with NAME one of {', '.join(found)}")
        program = shutil.which(path)
        if not program:
            raise click.BadParameter(f"{setting}: {path} is no program; name the bin/python of an environment")
        found[name] = Path(program)
    return found


def several(name: str, values: Sequence[Any], text: str, default: Sequence[Any] | None = None) -> Option:
    """Return an option that takes several of `values`; all by default, or what `default` lists."""
    kind: click.ParamType[Any] = click.Choice(values) if values else click.IntRange(min=1)
    chosen = ",".join(map(str, default or values))
    return click.option(name, type=Several(kind), default=chosen, show_default=True, help=text)


@click.command(help=__doc__)
@click.option("--output", type=click.Path(path_type=Path), required=True, help="JSON file to write.")
@several("--models", MODELS, "Whose weights all systems get.", PRESETS)
@several("--peers", PEERS, "Systems beside ours.", FOREIGN)
@several("--precision", PRECISIONS, "Of ours; int4 meets the peer's int8.")
@several("--batch-size", (), "Sources of one call.", (1, 8, 32))
@several("--num-beams", (), "1 is greedy.", (1, 4))
@several("--source-length", (), "Tokens of each source.", (32, 128))
@click.option("--rounds", type=click.IntRange(min=1), default=ROUNDS, show_default=True, help="Turns of each system.")
@click.option("--quick", is_flag=True, help=f"{QUICK_ROUNDS} rounds.")
@click.option("--python", "given", multiple=True, metavar="NAME=PATH", help="Python of an environment; repeatable.")
@click.option("--work", type=click.Path(path_type=Path), help="Keep converted weights here, and use those there as "
              "they are. Without it they go when the run ends.")  # fmt: skip
@click.option("--resume", is_flag=True, help="Go on with the file where a run has ended.")
def main(
    output: Path, models: list[str], peers: list[str], precision: list[str], batch_size: list[int],
    num_beams: list[int], source_length: list[int], rounds: int, quick: bool, given: tuple[str, ...],
    work: Path | None, resume: bool,
) -> None:  # fmt: skip
    rounds, environments = QUICK_ROUNDS if quick else rounds, pythons(given)
    if not any(environments[SYSTEMS[peer].environment].exists() for peer in peers):
        raise click.ClickException(
            f"nobody to compare with: no environment of {', '.join(peers)} is there; run benchmarks/environments"
        )
    kinds = [kind for kind in (False, True) if any((name != "fp32") == kind for name in precision)]
    settings = matrix(models, kinds, source_length, batch_size, num_beams)
    selection = Selection(peers=peers, precisions=precision, cores=available_cores(), rounds=rounds)
    options = {
        "models": models,
        "peers": peers,
        "precision": precision,
        "batch_size": batch_size,
        "num_beams": num_beams,
        "source_length": source_length,
        "rounds": rounds,
    }
    with ExitStack() as stack:
        try:
            folder = work or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="side-by-side-")))
            result = Result(output, options, resume=resume)
            compare(
                settings,
                selection,
                ConvertedWeights(folder, environments),
                result,
                lambda line: click.echo(line, err=True),
            )
        except TfexportError as error:
            raise click.ClickException(str(error)) from error
    click.echo(markdown.render(result.document))


if __name__ == "__main__":
    main()
