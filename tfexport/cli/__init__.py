"""Define the command line; each command makes one call into the library."""

from __future__ import annotations

import click

from tfexport.cli.commands import Commands
from tfexport.cli.generate import generate
from tfexport.cli.make import import_, onnx, triton, trt
from tfexport.cli.score import align, classify, embed, score
from tfexport.cli.serve import serve
from tfexport.cli.tools import bench, bench_compare, doctor, inspect, verify

_FORMER = {"golden": "reference", "form": "variant", "forms": "variants"}  # earlier names of options


@click.group(
    cls=Commands,
    context_settings={
        "show_default": True,
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda name: _FORMER.get(name, name),
    },
)
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
    classify,
    verify,
    serve,
    triton,
    bench,
    bench_compare,
    inspect,
    doctor,
):
    main.add_command(command)
