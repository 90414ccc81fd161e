"""The command line: each command opens, makes one call into the library and prints."""

from __future__ import annotations

import click

from tfexport.cli.align import align
from tfexport.cli.bench import bench, bench_compare
from tfexport.cli.build import trt
from tfexport.cli.checkpoint import import_
from tfexport.cli.commands import Commands
from tfexport.cli.export import onnx
from tfexport.cli.generate import embed, generate
from tfexport.cli.inspect import doctor, inspect
from tfexport.cli.score import score
from tfexport.cli.serve import serve
from tfexport.cli.triton import triton
from tfexport.cli.verify import verify


@click.group(cls=Commands, context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.version_option(package_name="tfexport")
def main() -> None:
    """Take a from-scratch encoder-decoder transformer from PyTorch to production."""


for command in (
    import_,
    onnx,
    trt,
    generate,
    score,
    align,
    embed,
    verify,
    serve,
    triton,
    bench,
    bench_compare,
    inspect,
    doctor,
):
    main.add_command(command)
