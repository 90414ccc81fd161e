#!/usr/bin/env python
"""Time programs in other languages beside this runtime: the same texts, answers compared, interleaved rounds.

Programs are those of docs/languages: they take BUNDLE, --json, --time, --batch-size and --threads, and texts on
standard input. What is timed is decoding with tokenisation, on one thread, without start and loading. The table is
Markdown.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import time
from pathlib import Path
from statistics import median

import click

import tfexport

OURS = "Python (tfexport)"


def program(command: str, bundle: Path, texts: list[str], batch_size: int) -> tuple[float, list[str]]:
    """Run a program once; return its seconds and answers."""
    options = ["--json", "--time", "--threads", "1", "--batch-size", str(batch_size)]
    words = [*shlex.split(command), str(bundle), *options]
    done = subprocess.run(words, input="\n".join(texts) + "\n", capture_output=True, text=True)
    took = re.search(r"([\d.]+) s$", done.stderr.strip())
    if done.returncode or not took:
        raise click.ClickException(f"{command}: {done.stderr.strip()}")
    return float(took[1]), [json.loads(line)["token_ids"] for line in done.stdout.splitlines()]


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path, exists=True))
@click.argument("source", type=click.Path(path_type=Path, exists=True))
@click.option("--program", "programs", multiple=True, required=True, metavar="NAME=COMMAND")
@click.option("--rounds", default=5, show_default=True)
@click.option("--batch-size", "batch_sizes", type=int, multiple=True, default=(1, 32), show_default=True)
def main(bundle: Path, source: Path, programs: tuple[str, ...], rounds: int, batch_sizes: tuple[int, ...]) -> None:
    """Decode the lines of SOURCE with BUNDLE."""
    texts = source.read_text(encoding="utf-8").splitlines()
    commands = {name: command for name, _, command in (one.partition("=") for one in programs)}
    model = tfexport.load(bundle, threads=1)
    expected = [list(result.token_ids) for result in model.generate(texts)]
    tokens = sum(map(len, expected))
    click.echo(f"{len(texts)} texts, {tokens} tokens; tokens a second, median of {rounds} rounds (lowest to highest)\n")
    click.echo("| | " + " | ".join(f"batch {size}" for size in batch_sizes) + " |\n|---|" + "---|" * len(batch_sizes))
    seconds: dict[tuple[str, int], list[float]] = {}
    for _ in range(rounds):
        for size in batch_sizes:
            start = time.perf_counter()
            model.generate(texts, batch_size=size)
            seconds.setdefault((OURS, size), []).append(time.perf_counter() - start)
            for name, command in commands.items():
                took, found = program(command, bundle, texts, size)
                if found != expected:
                    raise click.ClickException(f"{name}: answers differ from those of {OURS}")
                seconds.setdefault((name, size), []).append(took)
    for name in (OURS, *commands):
        rates = ([tokens / took for took in seconds[name, size]] for size in batch_sizes)
        cells = (f"{median(row):,.0f} ({min(row):,.0f} to {max(row):,.0f})" for row in rates)
        click.echo(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
