"""`tfexport bench` and `tfexport bench compare`."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any, get_args

import click

from tfexport.bench.config import BenchConfig, Scenario
from tfexport.cli.options import (
    INPUT,
    PATH,
    CommaList,
    backend_option,
    device_option,
    engine_option,
    form_option,
    threads_option,
    trusted_keys_option,
)
from tfexport.cli.terminal import inputs_of, report_line
from tfexport.errors import BenchError, printable, raise_all

_SIZES = CommaList(click.INT)


@click.command()
@click.argument("bundle", type=PATH, required=False)
@click.option(
    "--scenario",
    type=click.Choice(get_args(Scenario)),
    default=BenchConfig.scenario,
    help="One request at a time, batches, requests that arrive at --rate, or all combinations of sizes.",
)
@backend_option
@device_option
@form_option
@threads_option
@engine_option
@trusted_keys_option
@click.option("--batch-size", type=_SIZES, default=(), show_default=False, help="Texts decoded together.")
@click.option("--source-length", type=_SIZES, default=(), show_default=False, help="Tokens of each random source.")
@click.option("--target-length", type=_SIZES, default=(), show_default=False, help="New tokens, exactly so many.")
@click.option("--num-beams", default=BenchConfig.num_beams, help="Beams of beam search; 1 is greedy.")
@click.option("--input", "source", type=INPUT, help="File with one text a line instead of random sources.")
@click.option("--rate", type=float, help="Requests a second of the server scenario.")
@click.option(
    "--goal-p99", type=float, metavar="MS", help="Bound that the highest rate is searched for, without --rate."
)
@click.option("--goal-ms", type=float, metavar="MS", help="Latency within which an answer counts for goodput.")
@click.option("--slots", type=int, help="Rows that the engine of the server scenario decodes at once.")
@click.option("--url", help="Measure a running server, such as http://127.0.0.1:8000.")
@click.option("--model", help="Its model, where it has several.")
@click.option("--token-file", type=click.Path(), help="File whose first line is the bearer token that it asks for.")
@click.option("--duration", type=float, help="Seconds to measure in each process, for each combination in a sweep.")
@click.option("--processes", default=BenchConfig.processes, help="Fresh processes to measure in, one after the other.")
@click.option("--seed", default=BenchConfig.seed, help="Of the random sources and arrivals.")
@click.option("--verify/--no-verify", default=True, help="Refuse a bundle that PyTorch does not agree with.")
@click.option("--against", metavar="SOURCE", help="Model directory or PACKAGE.MODULE:FACTORY that it is verified with.")
@click.option("--json", "json_file", type=PATH, help="File to write the whole report to.")
@click.option("--html", "html_file", type=PATH, help="Page to write, with plots.")
def bench(
    bundle: Path | None,
    source: Path | None,
    trusted_keys: tuple[Path, ...],
    verify: bool,
    against: str | None,
    json_file: Path | None,
    html_file: Path | None,
    **config: Any,
) -> None:
    """Measure how fast BUNDLE generates, in what time and memory, or the server at --url.

    `tfexport bench compare` compares two reports.
    """
    settings = BenchConfig(**config, trusted_keys=tuple(map(str, trusted_keys)))
    if json_file and html_file and json_file.resolve() == html_file.resolve():
        raise click.UsageError("--json and --html are the same file; choose two.")
    texts = None if source is None else inputs_of((), source)
    from tfexport.bench.page import render
    from tfexport.bench.run import bench_bundle
    from tfexport.bench.table import lines
    from tfexport.files.text import write_whole

    with ExitStack() as stack:
        json_lines = stack.enter_context(write_whole(json_file)) if json_file else []
        html_lines = stack.enter_context(write_whole(html_file)) if html_file else []
        result = bench_bundle(bundle, settings, texts=texts, verify=verify, against=against, report=report_line)
        json_lines.append(json.dumps(result, indent=2, allow_nan=False))
        html_lines.append(render(result).rstrip())
        click.echo("\n".join(map(printable, lines(result))))


@click.command("bench compare")
@click.argument("first", type=PATH)
@click.argument("second", type=PATH)
@click.option("--fail-if", multiple=True, help="Change to refuse, such as 'output_token_throughput<-5%'; repeatable.")
@click.option(
    "--vary",
    type=CommaList(click.STRING),
    default=(),
    show_default=False,
    help="What may differ, such as backend,threads.",
)
def bench_compare(first: Path, second: Path, fail_if: tuple[str, ...], vary: tuple[str, ...]) -> None:
    """Compare the reports FIRST and SECOND of `tfexport bench --json`; exit with 1 when a --fail-if holds.

    A bundle named compare is measured as ./compare.
    """
    from tfexport.bench.compare import Condition, compare, read_result

    conditions = [Condition.parse(text) for text in fail_if]
    found = compare(read_result(first), read_result(second), conditions, vary)
    click.echo("\n".join(map(printable, found.lines)))
    raise_all(BenchError, "bench compare", found.failures)
