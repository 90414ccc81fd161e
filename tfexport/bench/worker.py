"""The fresh process that measures: loads a bundle, runs the scenario, writes what it found as one line of JSON."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

from tfexport.bench.caller import Caller
from tfexport.bench.config import BenchConfig
from tfexport.bench.machine import memory_bandwidth, peak_memory_bytes
from tfexport.bench.scenario import closed_loop
from tfexport.bench.server import measure_engine, measure_url
from tfexport.bench.sources import encoded, random_batches, text_batches
from tfexport.bench.timing import clock
from tfexport.bundle.bundle import open_bundle
from tfexport.bundle.step_weights import step_weight_bytes
from tfexport.cores import available_cores
from tfexport.errors import TfexportError
from tfexport.model.load import load
from tfexport.model.model import Model
from tfexport.runtime.registry import get

# Before the first window; shorter where the measurement itself is short.
_WARM_UP_S = 0.5
# How large a memory is read where it is not known how much a step reads.
_SOME_BYTES = 64 * 1024 * 1024


def measure(bundle: Path | None, config: BenchConfig, texts: list[str] | None, number: int) -> dict[str, Any]:
    """Load a bundle, or ask a server, and run every cell of a scenario.

    Args:
        bundle: its directory; None for a server whose bundle is not here.
        config: resolved.
        texts: to decode; None for random sources.
        number: of the process, from 0; each draws an arrival schedule of its own.

    Returns:
        JSON values that `tfexport.bench.result` reads.
    """
    if config.url:
        return measure_url(bundle, config, texts, number)
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
    """Call `generate` again and again."""
    load_s, model = clock(
        lambda: load(
            bundle,
            backend=config.backend,
            form=config.form,
            threads=config.threads,
            device=config.device,
            engine=config.engine,
            trusted_keys=config.trusted_keys or None,
        )
    )
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
    """End when standard input does, which the parent holds open: it may be killed and then tells nobody."""
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
