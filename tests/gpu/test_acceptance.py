"""Test the GPU acceptance without a GPU: skipped parts, reports, crashes."""

from __future__ import annotations

import importlib
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import ROOT
from tests.gpu import acceptance, behavior, decodes, latency, parity
from tests.gpu.job import Job
from tests.gpu.parts import PARTS, Part
from tests.gpu.torch_engine import TorchEngine
from tests.tensorrt.cuda_double import CudaDouble
from tests.tensorrt.session.trt_double import trt_session
from tfexport.bundle.bundle import open_bundle
from tfexport.doctor import Diagnosis, Library
from tfexport.runtime.registry import LoadOptions, open_session
from tfexport.tensorrt.cuda import find_gpus

Once = Callable[[str, Callable[[Path], object]], Path]
PART = PARTS[0]
SMALL = ((1, 1), (3, 2))


def machine() -> Diagnosis:
    libraries = (Library("numpy", "", "1.26", "2.0", ""),)
    return Diagnosis("0", "3.11", "Linux x86_64", (), "", libraries, (), (), ())


def checks(path: Path) -> dict[str, dict[str, Any]]:
    return {check["name"]: check for check in acceptance.read_checks(path)}


@pytest.fixture
def job(tmp_path: Path, dates_bundle: Path) -> Job:
    (tmp_path / "bundles").mkdir()
    made = Job(tmp_path, tmp_path / "found.jsonl")
    made.copy("dates-fp32", dates_bundle, engines=False)
    return made


@pytest.mark.skipif(bool(find_gpus()), reason="there is a GPU")
def test_without_a_gpu_everything_is_skipped_with_a_reason_and_reported(tmp_path: Path) -> None:
    began = time.monotonic()
    command = [str(ROOT / "scripts" / "gpu-acceptance"), "--output", str(tmp_path / "out")]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - began < 60
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["passed"] is True
    assert [part["part"] for part in report["parts"]] == [part.name for part in PARTS]
    assert all(part["status"] == "skipped" and part["reason"] for part in report["parts"])
    text = (tmp_path / "out" / "report.md").read_text()
    assert all(f"| {part.name} | " in text for part in PARTS)


def test_every_part_has_a_function_and_its_own_name() -> None:
    for part in PARTS:
        module, _, function = part.where.partition(".")
        assert callable(getattr(importlib.import_module(f"tests.gpu.{module}"), function)), part.name
    assert len({part.name for part in PARTS}) == len(PARTS)


@pytest.mark.parametrize(
    ("program", "status", "reason", "found"),
    [
        ("write('passed')", "passed", "", 1),
        ("write('passed'); write('failed')", "failed", "", 2),
        ("write('refused')", "refused", "", 1),
        ("write('passed'); os.kill(os.getpid(), 11)", "failed", "crashed with signal 11", 1),
        ("write('passed'); print('the end'); sys.exit(3)", "failed", "exit code 3", 1),
        ("pass", "failed", "nothing was checked", 0),
        ("write('passed'); open(found, 'a').write('{\"na'); time.sleep(60)", "failed", "no end within 1 s", 1),
    ],
)
def test_a_part_that_fails_crashes_or_hangs_is_a_result(
    tmp_path: Path, program: str, status: str, reason: str, found: int
) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(
        "import json, os, sys, time\n"
        "found = os.environ['GPU_FOUND']\n"
        "def write(status):\n"
        "    check = dict(name='a', status=status, detail='', seconds=1.0, numbers={})\n"
        "    open(found, 'a').write(json.dumps(check) + '\\n')\n"
        f"{program}\n"
    )
    part = Part("part", "where", "what", 1 if "sleep" in program else 60, ())
    outcome = acceptance.run_part(part, tmp_path, 100, (sys.executable, str(worker)))
    assert (outcome.status, outcome.reason, len(outcome.checks)) == (status, reason, found)
    assert outcome.tail == ("the end" if "the end" in program else "")


def test_parts_after_the_time_limit_are_skipped(tmp_path: Path) -> None:
    outcomes = acceptance.run_parts(tmp_path, time.monotonic() + acceptance.LEAST_S - 1)
    assert {(outcome.status, outcome.reason) for outcome in outcomes} == {("skipped", "out of time")}
    worker = tmp_path / "worker.py"
    worker.write_text("import time; time.sleep(60)")
    cut = acceptance.run_part(PART, tmp_path, 0.5, (sys.executable, str(worker)))
    assert (cut.status, cut.reason) == ("skipped", "out of time")


def check(name: str, status: str = "passed", detail: str = "", **numbers: Any) -> dict[str, Any]:
    return {"name": name, "status": status, "detail": detail, "seconds": 1.0, "numbers": numbers}


def test_the_report_has_reasons_and_numbers(tmp_path: Path) -> None:
    ms, both = {"batch 1, greedy": 0.125, "batch 8, beam 4": 3.5}, {"batch 1, greedy": 1.0, "batch 8, beam 4": 2.0}
    read = {"batch 1, greedy": 100_000_000, "batch 8, beam 4": 700_000_000}
    refused = check("default", "refused", "UNSUPPORTED_CC | no")
    eager = check("eager", step_ms=both, step_bytes=read, launches={})
    ort = check("ort", step_ms=ms, step_bytes=read, launches={"batch 1, greedy": 223.0})
    outcomes = [
        acceptance.Outcome("rtx-accepts", "takes", "refused", checks=[refused]),
        acceptance.Outcome("primitives", "all", "passed", checks=[check("bandwidth", bandwidth_gb_s=4000)]),
        acceptance.Outcome("eager-latency", "ms", "passed", checks=[eager]),
        acceptance.Outcome("ort-latency", "ms", "failed", checks=[ort], tail="Traceback"),
    ]
    acceptance.write(tmp_path, machine(), outcomes, 3.0)
    text = (tmp_path / "report.md").read_text()
    assert "UNSUPPORTED_CC \\| no" in text
    assert "## Milliseconds a step\n\n| backend | batch 1, greedy | batch 8, beam 4 |" in text
    assert "| eager | 1.000 | 2.000 |\n| ort | 0.125 | 3.500 |" in text
    # 100 MB in 0.125 ms are 800 GB/s, a fifth of 4,000.
    assert "## Percent of the measured 4000 GB/s" in text
    assert "| eager | 2 | 9 |\n| ort | 20 | 5 |" in text
    assert "## Kernels, copies and fills a step\n\n| backend | batch 1, greedy |\n| --- | --- |\n| ort | 223 |" in text
    assert "| bandwidth | passed | 1.0 | bandwidth_gb_s 4000 |" in text
    assert "| eager | passed | 1.0 |  |" in text, "numbers by setting are only in their tables"
    assert "Traceback" in text
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["passed"] is False
    assert report["parts"][3]["checks"][0]["numbers"]["step_ms"] == ms


@pytest.mark.skipif(bool(find_gpus()), reason="there is a GPU")
def test_engines_are_built_and_checks_that_need_a_gpu_fail(job: Job) -> None:
    pytest.importorskip("tensorrt_rtx")
    parity.parity(job, "tensorrt-rtx", "dates", "static", "fp32", 4)
    behavior.sessions(job, "tensorrt-rtx")
    found = checks(job.work / "found.jsonl")
    assert found["build dates-fp32 static fp32"]["status"] == "passed"
    assert found["build dates-fp32 static fp32"]["numbers"]["MiB"] > 1
    for name in ("dates static fp32", "two sessions, eight threads"):
        assert found[name]["status"] == "failed"
        assert "here is none that can be used" in found[name]["detail"]


@pytest.fixture
def doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    def open_engine(path: Path, name: str) -> Any:
        bundle = open_bundle(path)
        graphs = {graph: bundle.file(entry.file) for graph, entry in bundle.manifest.graphs.items()}
        return trt_session(graphs, bundle.manifest.spec, "static")

    monkeypatch.setattr(decodes, "open_engine", open_engine)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "PRECISIONS", ("fp32",))
    monkeypatch.setattr(latency, "measure", lambda session, read: decodes.measure(session, read, SMALL))
    monkeypatch.setattr(latency, "launches", lambda session, count: decodes.launches(session, count, SMALL))
    monkeypatch.setattr(latency, "given_to_gpu", lambda call: 0)
    monkeypatch.setattr(decodes, "NEW_TOKENS", 5)


def test_latency_is_measured_with_graphs_and_without(
    job: Job, doubles: None, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latency, "MEASURED", "dates")
    monkeypatch.setattr(job, "engine", lambda *arguments, **more: "double")
    latency.latency(job, "tensorrt")
    latency.double_latency(job, CudaDouble, TorchEngine)
    latency.ort_latency(job, "cpu")
    found = checks(job.work / "found.jsonl")
    assert {check["status"] for check in found.values()} == {"passed"}, found
    others = ("engine double fp32", "ort cpu static fp32", "ort cpu concat fp32")
    for name in ("tensorrt fp32", "tensorrt fp32 without CUDA graphs", *others):
        numbers = found[name]["numbers"]
        assert list(numbers["step_ms"]) == ["batch 1, greedy", "batch 3, beam 2"]
        assert all(time > 0 for time in numbers["step_ms"].values())
        assert all(0 < steps <= 5 for steps in numbers["steps"].values())
        assert numbers["launches"] == {}, "nothing was seen"
    assert "fp32: equal tokens with and without CUDA graphs" in found


def test_the_eager_model_is_measured(job: Job, small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    # The compiler itself takes minutes on a CPU.
    monkeypatch.setattr(torch, "compile", lambda step, dynamic: step)
    monkeypatch.setattr(latency, "MEASURED", "tiny")
    monkeypatch.setattr(latency, "given_to_gpu", lambda call: (call(), 7)[1])
    monkeypatch.setattr(latency, "PRECISIONS", ("fp16", "fp32"))
    latency.torch_latency(job, compiled=True, device="cpu")
    found = checks(job.work / "found.jsonl")
    half, full = found["torch.compile fp16"], found["torch.compile fp32"]
    for check in (half, full):
        assert check["status"] == "passed", check
        assert check["numbers"]["launches"] == {"batch 1, greedy": 0.0, "batch 3, beam 2": 0.0}, "no more when longer"
        assert len(check["numbers"]["step_ms"]) == 2
    read = [check["numbers"]["step_bytes"]["batch 1, greedy"] for check in (half, full)]
    assert read[1] == 2 * read[0]


def test_sessions_are_compared_from_threads(dates_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decodes, "NEW_TOKENS", 6)
    bundle = open_bundle(dates_bundle)
    opened = [
        open_session(bundle, LoadOptions(backend="ort", variant=variant, threads=1)) for variant in ("static", "concat")
    ]
    behavior.together(opened)
    calls = itertools.count()
    monkeypatch.setattr(behavior, "hypotheses", lambda *task: next(calls) > 6)
    with pytest.raises(AssertionError, match="threads get other tokens"):
        behavior.together(opened[:1])
    for session in opened:
        session.close()


def test_damaged_engines_are_refused(job: Job, doubles: None, variant: Callable[[str], Path]) -> None:
    pytest.importorskip("tensorrt_rtx")
    job.copy("tiny-fp32", variant("post"), engines=False)
    behavior.refusals(job, "tensorrt-rtx")
    found = checks(job.work / "found.jsonl")
    assert {check["status"] for check in found.values()} == {"passed"}, found
    assert "requests that are too large" in found
