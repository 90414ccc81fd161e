"""What runs under faults; only what is slow and touches no file is remembered from one run to the next."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from types import SimpleNamespace
from typing import Any


def command(arguments: list[str]) -> None:
    """Run the command line."""
    from tfexport.cli import main

    main(args=arguments, prog_name="tfexport")


def bulk(arguments: list[str]) -> None:
    """Generate for a file in parts of three rows, with a bundle, an input and an output; exits as the command does."""
    import tfexport
    from tfexport.bulk.config import BulkConfig
    from tfexport.bulk.run import generate_file
    from tfexport.cli.process import terminable

    bundle, source, target = arguments
    with terminable(), tfexport.load(bundle, threads=1) as model:
        try:
            generate_file(model, source, target, BulkConfig(rows_per_part=3), report=print)
        except tfexport.TfexportError as error:
            print(f"error: {error}", file=sys.stderr)
            raise SystemExit(1) from error


def load(arguments: list[str]) -> None:
    """Import modules."""
    for name in arguments:
        __import__(name)


def remember_traces(_: list[str]) -> None:
    """Trace each part of a model once."""
    import onnx_ir as ir
    import torch

    export, known = torch.onnx.export, {}

    def remembered(module: Any, **options: Any) -> Any:
        kind = (str(vars(module).get(name)) for name in ("form", "source"))
        key = type(module).__name__, *kind, options["opset_version"]
        if key not in known:
            known[key] = ir.to_proto(export(module, **options).model)
        return SimpleNamespace(model=ir.from_proto(known[key]))

    torch.onnx.export = remembered


def remember_plans(_: list[str]) -> None:
    """Build each plan once."""
    from tfexport.tensorrt import pipeline

    build_one, known = pipeline._build, {}

    def remembered(resolved: Any, graph: Any, progress: Any) -> Any:
        if graph.name not in known:
            known[graph.name] = build_one(resolved, graph, progress)
        return known[graph.name]

    pipeline._build = remembered


def reload(arguments: list[str]) -> None:
    """Replace a served bundle by itself again and again; the n-th time its n-th call fails.

    Writes to standard output, as JSON: names of the calls of a whole replacement, and what was wrong.
    """
    from tests.fuzz.faults.worker import faults
    from tfexport.errors import TfexportError
    from tfexport.serve.engine import Engine

    bundle, text, error = arguments[0], arguments[1], int(arguments[2])
    folder, wrong, log = bundle.encode(), [], os.memfd_create("calls")

    async def run() -> None:
        async with Engine(bundle, threads=1) as engine:
            expected = (await engine.generate(text))[0].text
            faults.faults_arm(folder, 0, 0, log)
            await engine.replace()
            for at in range(1, faults.faults_disarm() + 1):
                faults.faults_arm(folder, at, error, -1)
                try:
                    await engine.replace()
                except TfexportError:
                    pass
                except Exception as other:  # noqa: BLE001 - whatever it is, it is reported
                    wrong.append(f"call {at}: {other!r}")
                finally:
                    faults.faults_disarm()
                if (await engine.generate(text))[0].text != expected:
                    wrong.append(f"call {at}: another text")

    asyncio.run(run())
    calls = os.pread(log, os.fstat(log).st_size, 0).decode().splitlines()
    print(json.dumps({"calls": calls, "wrong": wrong}))
