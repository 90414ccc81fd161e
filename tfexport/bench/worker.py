"""The fresh process that measures: it reads a task as a line of JSON and answers with one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from tfexport import errors
from tfexport.bench.calls import Caller, closed_loop, encoded, random_batches, text_batches
from tfexport.bench.config import BenchConfig
from tfexport.bench.machine import memory_bandwidth, peak_memory_bytes
from tfexport.bench.server import measure_engine, measure_url
from tfexport.bench.timing import clock
from tfexport.bundle.bundle import open_bundle
from tfexport.bundle.step_weights import step_weight_bytes
from tfexport.errors import BenchError, TfexportError
from tfexport.model.load import load
from tfexport.model.model import Model
from tfexport.runtime.cpu import available_cores
from tfexport.runtime.registry import get

# Before the first window, at most.
_WARM_UP_S = 0.5
# Bytes to read for the bandwidth of the memory if it is not known how much a step reads.
_SOME_BYTES = 64 * 1024 * 1024


def run_process(bundle: Path | None, config: BenchConfig, texts: Sequence[str] | None, number: int) -> dict[str, Any]:
    """Measure once in a fresh process; see `measure`.

    Raises:
        TfexportError: the process raised it.
        BenchError: the process died.
    """
    task = {"bundle": bundle and str(bundle), "config": config.to_dict(), "texts": texts, "number": number}
    code, output, complaint = _communicate(json.dumps(task).encode() + b"\n")
    if code or not output:
        died = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        reason = f" ({complaint})" if complaint else ""
        raise BenchError(f"bench: process {number + 1} {died}{reason}; try a smaller --batch-size, or tfexport doctor")
    found: dict[str, Any] = json.loads(output.rpartition("\n")[2])
    if error := found.get("error"):
        raise getattr(errors, error["class"], TfexportError)(error["message"])
    return found


def _communicate(task: bytes) -> tuple[int, str, str]:
    """Return exit code, standard output and the last line of standard error.

    Standard input stays open until the end; the process ends when it is closed.
    """
    command = [sys.executable, "-P", "-m", "tfexport.bench.worker"]
    with tempfile.TemporaryFile() as complaints:
        process = subprocess.Popen(  # noqa: S603 - our own module, our own interpreter
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=complaints
        )
        with process:
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                _send(process.stdin, task)
                output = process.stdout.read().decode()
                code = process.wait()
            finally:
                process.kill()
        complaints.seek(0)
        lines = complaints.read().decode(errors="replace").strip().splitlines()
    return code, output.strip(), lines[-1] if lines else ""


def _send(stdin: IO[bytes], task: bytes) -> None:
    try:
        stdin.write(task)
        stdin.flush()
    except BrokenPipeError:  # the process has died already; its exit code is reported
        with contextlib.suppress(BrokenPipeError):
            stdin.close()  # now, because closing it later would flush and fail again


def measure(bundle: Path | None, config: BenchConfig, texts: list[str] | None, number: int) -> dict[str, Any]:
    """Load a bundle, or ask a server, and run every cell of a scenario.

    Args:
        bundle: its directory; None for a server whose bundle is not here.
        config: resolved.
        texts: to decode; None for random sources.
        number: of the process, from 0; each draws its own arrival schedule.

    Returns:
        JSON values for `tfexport.bench.report.build_result`.
    """
    if config.url:
        return asyncio.run(measure_url(bundle, config, texts, number))
    assert bundle
    measured = measure_engine if config.scenario == "server" else _measure_calls
    found, model = measured(bundle, config, texts, number)
    peak = peak_memory_bytes()
    reads_weights = get(model.session.backend).runs == "graphs" and config.device == "cpu"
    weight_bytes = step_weight_bytes(open_bundle(bundle)) if reads_weights else None
    threads = model.threads.decoder if model.threads else available_cores()
    return {
        "backend": model.session.backend,
        "threads": threads,
        "peak_memory_bytes": peak,
        "step_weight_bytes": weight_bytes,
        "memory_bandwidth": memory_bandwidth(weight_bytes or _SOME_BYTES, threads),
        **found,
    }


def _measure_calls(
    bundle: Path, config: BenchConfig, texts: list[str] | None, number: int
) -> tuple[dict[str, Any], Model]:
    load_s, model = clock(lambda: load(bundle, **config.load_options))
    sources = None if texts is None else encoded(model, texts)
    first_token_s, cells = None, []
    for cell in config.cells:
        assert config.duration  # resolved
        assert cell.batch_size
        call = Caller(model.session, config.decoding(cell))
        batches = (
            random_batches(model.spec, cell, config.seed)
            if sources is None
            else text_batches(sources, cell.batch_size, config.seed)
        )
        first = call(batches[0])
        if first_token_s is None:
            first_token_s = load_s + first.first_token - first.began
        closed_loop(call, batches, min(_WARM_UP_S, config.duration / 5))
        cells.append(closed_loop(call, batches, config.duration).to_dict())
    return {"load_s": load_s, "load_to_first_token_s": first_token_s, "cells": cells}, model


def _end_with_parent() -> None:
    """End the process when standard input is closed: the parent may have been killed."""
    os.read(0, 1)
    os._exit(1)


def main() -> None:
    """Read the task from standard input, write the measurement or the error to standard output."""
    task = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        config = BenchConfig.from_dict(task["config"])
        found = measure(task["bundle"] and Path(task["bundle"]), config, task["texts"], task["number"])
    except TfexportError as error:
        found = {"error": {"class": type(error).__name__, "message": str(error)}}
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
