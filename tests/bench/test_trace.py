"""A trace has the phases of a call without gaps, and the runs of each graph inside them."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.command import refuses, run
from tests.conftest import ROOT
from tfexport._io import phases
from tfexport.bench.config import BenchConfig, resolve
from tfexport.bench.trace import trace_calls
from tfexport.bundle.bundle import open_bundle

LENGTH = 6
Event = dict[str, Any]


def traced(path: Path, beams: int = 1, texts: list[str] | None = None) -> list[Event]:
    bundle = open_bundle(path)
    config = BenchConfig(
        backend="ort",
        scenario="offline",
        batch_size=(2,),
        num_beams=beams,
        target_length=(LENGTH,),
        threads=1,
        variant="static",
    )
    resolved = resolve(config, bundle.manifest.spec, has_texts=texts is not None)
    found = trace_calls(bundle, resolved, texts, lambda line: None)
    assert json.loads(json.dumps(found))["displayTimeUnit"] == "ms"
    return list(found["traceEvents"])


def spans(events: list[Event], **wanted: object) -> list[tuple[float, float]]:
    chosen = [event for event in events if all(event.get(name) == value for name, value in wanted.items())]
    return [(event["ts"], event["ts"] + event["dur"]) for event in sorted(chosen, key=lambda event: event["ts"])]


def test_phases_follow_each_other_and_contain_the_runs_of_graphs(dates_bundle: Path) -> None:
    events = traced(dates_bundle)
    names = {event["args"]["name"]: event["pid"] for event in events if event["ph"] == "M"}
    assert names.keys() == {"phases, ort", "encoder", "decoder_static"}
    (call,) = spans(events, cat="call")
    all_phases = spans(events, cat="phase")
    assert all_phases[-1][1] == pytest.approx(call[1])
    assert all(before[1] <= after[0] + 1 for before, after in pairwise(all_phases))
    steps, adds = spans(events, name="step"), spans(events, name="encode and prefill")
    decoder = spans(events, name="model_run", pid=names["decoder_static"])
    assert (len(adds), len(decoder)) == (1, len(steps))
    for run_of_graph, step in zip(decoder, steps, strict=True):
        assert step[0] <= run_of_graph[0] + 50  # two clocks
        assert run_of_graph[1] <= step[1] + 50
    (encoder,) = spans(events, name="model_run", pid=names["encoder"])
    assert adds[0][0] - 50 <= encoder[0] <= encoder[1] <= adds[0][1] + 50
    operators = {event["args"]["op_name"] for event in events if event.get("cat") == "Node"}
    assert {"TensorScatter", "TopK"} <= operators


def test_beams_and_texts(dates_bundle: Path) -> None:
    events = traced(dates_bundle, beams=2, texts=["3 March 2026", "le 14 juillet 1989"])
    assert spans(events, name="reorder")
    assert spans(events, name="select")


def test_a_server_is_not_profiled(dates_bundle: Path, tmp_path: Path) -> None:
    server = ("--scenario", "server", "--rate", "1", "--url", "http://127.0.0.1:1")
    arguments = (*server, "--profile", tmp_path / "trace.json")
    refuses(run("bench", dates_bundle, *arguments), "--profile decodes a bundle")
    assert not (tmp_path / "trace.json").exists()


NVTX = """
marked = []
def annotate(name, domain):
    def decorate(function):
        marked.append((name, domain, function.__qualname__))
        return function
    return decorate
"""
PRINT = """
import nvtx, tfexport.decode.loop, tfexport.tensorrt.session._replica
print(*sorted({f"{name} {domain} {function}" for name, domain, function in nvtx.marked}), sep="\\n")
"""


def test_phases_are_ranges_of_nvtx_if_it_is_installed(tmp_path: Path) -> None:
    (tmp_path / "nvtx.py").write_text(NVTX)
    script = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]{PRINT}"
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert printed.splitlines() == [
        "encode tfexport Encoder.run",
        "prefill tfexport Decoder.prefill",
        "reorder tfexport Decoder.reorder",
        "select tfexport BeamSearch.follow_beams",
        "select tfexport BeamSearch.take",
        "select tfexport GreedySearch.follow",
        "select tfexport GreedySearch.take",
        "step tfexport Decoder.step",
    ]


def test_without_nvtx_functions_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "_HAS_NVTX", False)
    assert phases.phase("step")(len) is len
