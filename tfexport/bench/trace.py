"""Write a trace of decoder calls for Perfetto or chrome://tracing.

Rows are the phases of each call, and the operators of each graph in ONNX Runtime or the layers of each engine.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tfexport._io.names import PROFILE_START
from tfexport.bench._loops import Call, encoded, random_batches, text_batches, timed_call
from tfexport.bench.config import BenchConfig, Cell
from tfexport.bundle.bundle import Bundle
from tfexport.model.load import load
from tfexport.runtime.registry import LoadOptions, open_session

_PHASES = 1  # process id of the phases in a trace; those of graphs follow


def trace_calls(
    bundle: Bundle, config: BenchConfig, texts: Sequence[str] | None, report: Callable[[str], None]
) -> dict[str, Any]:
    """Decode one batch of every cell with profilers; return a trace as JSON values."""
    sources = None
    if texts is not None:
        with load(bundle.path, **config.load_options) as model:
            sources = encoded(model, texts)
    events: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        options = {name: value for name, value in config.load_options.items() if name != "trusted_keys"}
        session = open_session(bundle, LoadOptions(**options, profile=Path(folder)))
        events.append(_named(_PHASES, f"phases, {session.backend}"))
        try:
            epoch_us = time.time() * 1e6 - time.perf_counter() * 1e6
            for cell in config.cells:
                report(f"profiling {_spelled(cell)}")
                if sources is None:
                    batch = random_batches(bundle.manifest.spec, cell, config.seed)[0]
                else:
                    batch = text_batches(sources, cell.batch_size or 1, config.seed)[0]
                timed_call(session, config.decoding(cell), batch)  # warms up
                call = timed_call(session, config.decoding(cell), batch)
                events += _phases(call, cell, epoch_us)
        finally:
            session.close()  # ONNX Runtime writes its profiles
        windows = [(event["ts"], event["ts"] + event["dur"]) for event in events if event.get("cat") == "call"]
        for number, path in enumerate(sorted(Path(folder).iterdir()), _PHASES + 1):
            events += _operators(path, number, windows)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _phases(call: Call, cell: Cell, epoch_us: float) -> Iterator[dict[str, Any]]:
    """Yield a call, its phases, and the selection of tokens on the host between them."""

    def event(name: str, category: str, began: float, ended: float) -> dict[str, Any]:
        placed = {"ts": epoch_us + began * 1e6, "dur": (ended - began) * 1e6, "pid": _PHASES, "tid": 1}
        return {"name": name, "cat": category, "ph": "X", **placed}

    yield event(_spelled(cell), "call", call.began, call.ended)
    last = call.began
    for name, began, seconds in call.phases:
        if last > call.began:  # before the first phase, requests are checked and padded
            yield event("select", "phase", last, began)
        last = began + seconds
        yield event(name, "phase", began, last)
    yield event("select", "phase", last, call.ended)


def _operators(folder: Path, pid: int, windows: Sequence[tuple[float, float]]) -> list[dict[str, Any]]:
    """Return the events of one graph within the calls, on the clock of the phases."""
    (profile,) = folder.glob("*.json")
    start_us = int((folder / PROFILE_START).read_text()) / 1e3
    events = []
    for event in json.loads(profile.read_text()):
        at = start_us + event.get("ts", 0)
        if event.get("ph") == "X" and any(began <= at <= ended for began, ended in windows):
            events.append({**event, "ts": at, "pid": pid, "tid": 1})
    return [*events, _named(pid, folder.name.partition(" ")[2])] if events else []


def _named(pid: int, name: str) -> dict[str, Any]:
    return {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}}


def _spelled(cell: Cell) -> str:
    sizes = {"batch": cell.batch_size, "source": cell.source_length, "target": cell.target_length}
    return ", ".join(f"{name} {size}" for name, size in sizes.items() if size)
