#!/usr/bin/env python
"""Soak a bundle that has recorded texts: mixed load for hours on a real server and on a model in process.

Greedy texts, beams, samples with seeds, alternatives, streams, tokens, callers
who go away or are too late, nonsense, and the bundle loaded again and again,
under a path that leads to two copies in turn. All texts have to be those of the
first run; memory, threads, descriptors and temporary files are watched.

Writes NAME.json, NAME.md and NAME.svg, every minute and at the end. The exit code
is 1 where a text differs, something is left behind, or resident memory rises by
more than 1 MB an hour over half an hour or more. Ctrl-C ends it early, in order.
Linux alone.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import signal
import tempfile
from pathlib import Path

import click
from soaking import report
from soaking.local import Local
from soaking.run import Plan, Soak
from soaking.server import Server

from tfexport.bundle.bundle import open_bundle
from tfexport.errors import BenchError, TfexportError
from tfexport.files.names import MANIFEST

# Of the recorded texts; each is asked in every way in the first run.
NUM_TEXTS = 24
_WRITTEN_EVERY_S = 60


def texts_of(bundle: Path) -> list[str]:
    """Return texts that a bundle was recorded with.

    Raises:
        BundleError: it cannot be opened.
        BenchError: it has none.
    """
    samples = open_bundle(bundle).manifest.text.samples
    if not samples:
        raise BenchError(f"{bundle}: has no recorded texts; give a bundle that was made with them")
    return [sample.text for sample in samples[:NUM_TEXTS]]


async def run(bundle: Path, plan: Plan, output: Path, work: Path) -> dict[str, object]:
    """Soak and write the report.

    Args:
        bundle: to serve.
        plan: how long and how much.
        output: JSON file.
        work: empty folder, for copies of the bundle and all that the processes write.

    Raises:
        TfexportError: the soak cannot begin.
    """
    texts, digest = texts_of(bundle), hashlib.sha256((bundle / MANIFEST).read_bytes()).hexdigest()
    copies = [work / "one", work / "two"]
    for copy in copies:
        shutil.copytree(bundle, copy)
    targets = [await Local.start(work / "local", bundle), await Server.start(work / "server", copies, "--threads", "1")]
    soak = Soak(targets, texts, plan)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, soak.stop.set)

    async def write_now_and_then() -> None:
        while True:
            await asyncio.sleep(_WRITTEN_EVERY_S)
            report.write(output, report.document(soak, digest, is_over=False))

    writing = asyncio.create_task(write_now_and_then())
    await soak.run(click.echo)
    writing.cancel()
    found = report.document(soak, digest, is_over=True)
    report.write(output, found)
    return found


@click.command(help=__doc__)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--minutes", type=click.FloatRange(min=0, min_open=True), default=120.0, show_default=True,
              help="Under load, after the warm-up.")  # fmt: skip
@click.option("--warm-up", type=click.FloatRange(min=0), default=10.0, show_default=True, metavar="MINUTES",
              help="Under the same load before.")  # fmt: skip
@click.option("--rate", type=click.FloatRange(min=0, min_open=True), default=Plan.rate, show_default=True,
              help="Asks a second, of the server and of the model in process each.")  # fmt: skip
@click.option("--reload-every", type=click.FloatRange(min=0, min_open=True), default=Plan.reload_every_s,
              show_default=True, metavar="SECONDS", help="Between two loadings of the bundle.")  # fmt: skip
@click.option("--output", type=click.Path(path_type=Path), default=Path("build/soak/soak.json"), show_default=True,
              help="JSON file to write; a page and a picture beside it.")  # fmt: skip
def main(bundle: Path, minutes: float, warm_up: float, rate: float, reload_every: float, output: Path) -> None:
    plan = Plan(load_s=60 * minutes, warm_up_s=60 * warm_up, rate=rate, reload_every_s=reload_every)
    output.parent.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix="soak-") as work:
            found = asyncio.run(run(bundle, plan, output, Path(work)))
    except TfexportError as error:
        raise click.ClickException(str(error)) from error
    click.echo(output.with_suffix(".md").read_text(encoding="utf-8"))
    if found["problems"]:
        raise click.ClickException("the soak has failed; the page says how")


if __name__ == "__main__":
    main()
