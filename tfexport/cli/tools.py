"""Define the commands `verify`, `bench`, `compare`, `inspect` and `doctor`."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from tfexport.bench.config import BenchConfig
from tfexport.cli.commands import EXIT_ERROR, EXIT_PARITY, main
from tfexport.cli.options import (
    INPUT,
    PATH,
    CommaList,
    config_of,
    config_options,
    device_option,
    engine_option,
    is_given,
    json_option,
    loading_options,
    trusted_keys_option,
)
from tfexport.cli.terminal import inputs_of, print_result, report_line, write_whole
from tfexport.errors import BenchError, printable
from tfexport.generation import DecodeConfig
from tfexport.runtime.registry import comparable

_COMPARABLE = [backend.name for backend in comparable()]


@main.command()
@click.argument("bundle", type=PATH)
@click.option("--against", metavar="SOURCE", help="Model directory or PACKAGE.MODULE:FACTORY that it was made from.")
@click.option("--samples", default=100, help="Random sequences to decode with each decoder variant and method.")
@click.option("--seed", default=0, help="Seed of the sequences.")
@click.option(
    "--backend", type=click.Choice(_COMPARABLE), default=_COMPARABLE[0], help="Compare the graphs, or an engine."
)
@engine_option
@device_option
@trusted_keys_option
@json_option
def verify(bundle: Path, samples: int, seed: int, as_json: bool, **options: Any) -> None:
    """Compare every stage of BUNDLE with PyTorch; exit with 2 if one differs."""
    from tfexport.verify import VerifyConfig, verify_bundle

    result = verify_bundle(bundle, config=VerifyConfig(samples=samples, seed=seed), report=report_line, **options)
    print_result(result.to_dict(), result.lines(), as_json)
    click.get_current_context().exit(0 if result.passed else EXIT_PARITY)


@main.command()
@click.argument("bundle", type=PATH, required=False)
@loading_options
@config_options(BenchConfig)
@click.option("--input", "source", type=INPUT, help="File with one text a line instead of random sources.")
@click.option("--verify/--no-verify", default=True, help="Refuse a bundle whose outputs differ from PyTorch.")
@click.option("--against", metavar="SOURCE", help="Model directory or PACKAGE.MODULE:FACTORY to verify with.")
@click.option("--json", "json_file", type=PATH, help="File to write the whole report to.")
@click.option("--html", "html_file", type=PATH, help="HTML page with plots to write.")
@click.option(
    "--profile",
    type=PATH,
    help="Chrome trace to write, for ui.perfetto.dev: phases and operators of one more batch of every size.",
)
def bench(
    bundle: Path | None, json_file: Path | None, html_file: Path | None, profile: Path | None, **options: Any
) -> None:
    """Measure the speed, latency and memory of BUNDLE, or of the server at --url.

    The exit code is 2 if the report is INVALID. `tfexport bench compare` compares two reports.
    """
    options |= options.pop("loading")
    options["trusted_keys"] = tuple(map(str, options["trusted_keys"] or ()))
    settings, source = config_of(BenchConfig, options), options["source"]
    if json_file and html_file and json_file.resolve() == html_file.resolve():
        raise click.UsageError("--json and --html are the same file; give two files.")
    texts = None if source is None else inputs_of((), source)
    from tfexport.bench.run import bench_bundle
    from tfexport.bench.show import check_page, lines, render

    if html_file:
        check_page()

    with ExitStack() as stack:
        json_lines = stack.enter_context(write_whole(json_file)) if json_file else []
        html_lines = stack.enter_context(write_whole(html_file)) if html_file else []
        trace = stack.enter_context(write_whole(profile)) if profile else None
        others: dict[str, Any] = {name: options[name] for name in ("verify", "against")}
        if trace is not None:
            others["write_trace"] = lambda found: trace.append(json.dumps(found))
        result = bench_bundle(bundle, settings, texts=texts, report=report_line, **others)
        json_lines.append(json.dumps(result, indent=2, allow_nan=False))
        if html_file:
            html_lines.append(render(result).rstrip())
        click.echo("\n".join(map(printable, lines(result))))
    click.get_current_context().exit(0 if result["validity"]["valid"] else EXIT_PARITY)


@main.command("bench compare")
@click.argument("first", type=PATH)
@click.argument("second", type=PATH)
@click.option("--fail-if", multiple=True, help="Change to fail on, such as 'output_token_throughput<-5%'; repeatable.")
@click.option(
    "--vary",
    type=CommaList(click.STRING),
    default=(),
    show_default=False,
    help="Fields that may differ, such as backend,threads.",
)
def bench_compare(first: Path, second: Path, fail_if: tuple[str, ...], vary: tuple[str, ...]) -> None:
    """Compare two reports of `tfexport bench --json`.

    The exit code is 2 if a condition of --fail-if holds. A bundle named compare is measured as ./compare.
    """
    from tfexport.bench.compare import Condition, compare, read_result

    conditions = [Condition.parse(text) for text in fail_if]
    lines, failures = compare(read_result(first), read_result(second), conditions, vary)
    click.echo("\n".join(map(printable, lines)))
    if failures:
        report_line(f"error: {BenchError(*failures, subject='bench compare')}")
        click.get_current_context().exit(EXIT_PARITY)


@main.command()
@click.argument("first", type=PATH)
@click.argument("second", type=PATH)
@click.option("--input", "source", type=INPUT, required=True, help="File with one text a line.")
@click.option("--batch-size", type=click.IntRange(min=1), default=32, help="Texts in a batch.")
@config_options(DecodeConfig, "num_beams", "max_new_tokens")
@loading_options
@json_option
def compare(
    first: Path, second: Path, source: Path, batch_size: int, loading: dict[str, Any], as_json: bool, **options: Any
) -> None:
    """Count the texts whose outputs differ between the bundles FIRST and SECOND.

    It shows what a shortlist or another precision changes, and the time of both.
    """
    from tfexport.bench.outputs import compare_outputs

    given = {name: value for name, value in options.items() if is_given(name)}
    texts = inputs_of((), source)
    found = compare_outputs((first, second), texts, batch_size=batch_size, loading=loading, options=given)
    print_result(found.to_dict(), found.lines(), as_json)


@main.command()
@click.argument("path", type=PATH)
@trusted_keys_option
@click.option(
    "--untrusted", is_flag=True, help="Read it in a process with limited memory and time that cannot write files."
)
@json_option
def inspect(path: Path, trusted_keys: tuple[Path, ...] | None, untrusted: bool, as_json: bool) -> None:
    """Describe a bundle, a model directory or an .onnx file."""
    from tfexport.describe import describe, inspect_path
    from tfexport.sandbox import inspect_untrusted

    if untrusted:
        found = inspect_untrusted(path, trusted_keys=trusted_keys or ())
    else:
        found = inspect_path(path, trusted_keys=trusted_keys)
    print_result(found, describe(found), as_json)


@main.command()
@json_option
def doctor(as_json: bool) -> None:
    """Report which backends work on this machine and how to repair the others.

    The exit code is 1 if no backend works.
    """
    from tfexport.doctor import diagnose

    found = diagnose()
    print_result(found.to_dict(), found.lines(), as_json)
    click.get_current_context().exit(0 if found.works else EXIT_ERROR)
