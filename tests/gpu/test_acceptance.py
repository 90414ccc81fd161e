"""The acceptance on a GPU, where there is none: it skips, reports and survives crashes; its parts do what they can."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import tiny
from tests.conftest import ROOT
from tests.gpu import acceptance, decodes
from tests.gpu import test_latency as latency
from tests.gpu import test_parity as parity
from tests.gpu import test_refusals as refusals
from tests.gpu import test_sessions as sessions
from tests.gpu.job import Job
from tests.gpu.parts import PARTS, Part
from tests.runtime.trt.trt_double import trt_session
from tests.tiny import VARIANTS
from tfexport.bundle.bundle import open_bundle
from tfexport.doctor import Diagnosis, Library
from tfexport.export import export_bundle
from tfexport.graph.config import ExportConfig
from tfexport.models.directory import save_model
from tfexport.runtime.registry import OpenOptions, open_session
from tfexport.trt.cuda import find_gpus

Once = Callable[[str, Callable[[Path], object]], Path]
PART = PARTS[0]
SMALL = ((1, 1), (3, 2))


def machine() -> Diagnosis:
    libraries = (Library("numpy", "", "1.26", "2.0", ""),)
    return Diagnosis("0", "3.11", "Linux x86_64", libraries, (), (), ())


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


def test_every_part_is_a_test_and_every_test_a_part() -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--collect-only",
        "-m",
        "gpu",
        "-p",
        "no:cacheprovider",
        "tests/gpu",
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    collected = [line.removeprefix("tests/gpu/") for line in done.stdout.splitlines() if "::" in line]
    assert sorted(collected) == sorted(part.test for part in PARTS), done.stdout


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
    part = Part("part", "test", "what", (), 1 if "sleep" in program else 60)
    outcome = acceptance.run_part(part, tmp_path, 100, (sys.executable, str(worker)))
    assert (outcome.status, outcome.reason, len(outcome.checks)) == (status, reason, found)
    assert outcome.tail == ("the end" if "the end" in program else "")


def test_what_the_time_does_not_allow_is_skipped(tmp_path: Path) -> None:
    outcomes = acceptance.run_parts(tmp_path, time.monotonic() + acceptance.LEAST_S - 1)
    assert {(outcome.status, outcome.reason) for outcome in outcomes} == {("skipped", "out of time")}
    worker = tmp_path / "worker.py"
    worker.write_text("import time; time.sleep(60)")
    cut = acceptance.run_part(PART, tmp_path, 0.5, (sys.executable, str(worker)))
    assert (cut.status, cut.reason) == ("skipped", "out of time")


def test_the_report_holds_words_and_milliseconds(tmp_path: Path) -> None:
    ms = {"batch 1, greedy": 1.25, "batch 8, beam 4": 3.5}
    outcomes = [
        acceptance.Outcome(
            "rtx-accepts", "takes", "refused", checks=[
                {"name": "default", "status": "refused", "detail": "UNSUPPORTED_CC | no", "seconds": 1.0, "numbers": {}}
            ],
        ),
        acceptance.Outcome(
            "ort-latency", "ms", "failed", tail="Traceback", checks=[
                {"name": "ort", "status": "passed", "detail": "", "seconds": 1.0, "numbers": {"latency_ms": ms}}
            ],
        ),
    ]  # fmt: skip
    acceptance.write(tmp_path, machine(), outcomes, 3.0)
    text = (tmp_path / "report.md").read_text()
    assert "UNSUPPORTED_CC \\| no" in text
    assert "| backend | batch 1, greedy | batch 8, beam 4 |" in text
    assert "| ort | 1.25 | 3.50 |" in text
    assert "Traceback" in text
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["passed"] is False
    assert report["parts"][1]["checks"][0]["numbers"]["latency_ms"] == ms


@pytest.mark.skipif(bool(find_gpus()), reason="there is a GPU")
def test_engines_are_built_and_what_needs_a_gpu_is_told(job: Job) -> None:
    """For real, as far as a machine without a GPU goes."""
    pytest.importorskip("tensorrt_rtx")
    parity.parity(job, "tensorrt-rtx", "dates", "static", "fp32", 4)
    parity.comparator(job, "tensorrt-rtx")
    sessions.sessions(job, "tensorrt-rtx")
    found = checks(job.work / "found.jsonl")
    assert found["build dates-fp32 static fp32"]["status"] == "passed"
    assert found["build dates-fp32 static fp32"]["numbers"]["MiB"] > 1
    for name in ("dates static fp32", "two sessions, eight threads"):
        assert found[name]["status"] == "failed"
        assert "here is none that can be used" in found[name]["detail"]


def test_a_build_that_fails_is_a_check_and_not_the_end(job: Job) -> None:
    pytest.importorskip("tensorrt_rtx")
    bundle = job.work / "bundles" / "dates-fp32"
    assert job.engine(bundle, "tensorrt-rtx", "static", "fp32", max_target_length=100_000) is None
    found = checks(job.work / "found.jsonl")
    assert found["build dates-fp32 static fp32 max_target_length 100000"]["status"] == "failed"


@pytest.mark.skipif(bool(find_gpus()), reason="there is a GPU")
def test_narrow_weights_are_built(job: Job) -> None:
    pytest.importorskip("tensorrt_rtx")
    parity.weights(job, "tensorrt-rtx")
    found = checks(job.work / "found.jsonl")
    assert found["build weights static fp16 weights int8"]["status"] == "passed"
    assert found["build weights static fp16 weights int4"]["status"] == "passed"
    assert "here is none that can be used" in found["dates in words, fp16, weights int4"]["detail"]


def test_reports_of_the_ladder_are_taken_over(job: Job, dates_bundle: Path) -> None:
    from tfexport.verify import VerifyConfig, verify_bundle

    report = verify_bundle(dates_bundle, config=VerifyConfig(samples=2))
    numbers: dict[str, Any] = {}
    parity.judge(report, numbers)
    assert "ort static" in numbers["errors"]
    assert "ort static greedy 2+0/2" in numbers["exact"]
    assert parity.read_dates(dates_bundle, backend="ort", form="concat")[0] == "2026-03-03"


@pytest.fixture
def doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put doubles where engines are opened."""

    def open_engine(path: Path, name: str) -> Any:
        bundle = open_bundle(path)
        graphs = {graph: bundle.file(entry.file) for graph, entry in bundle.manifest.graphs.items()}
        return trt_session(graphs, bundle.manifest.spec, "static")

    monkeypatch.setattr(decodes, "open_engine", open_engine)


def test_latency_is_measured_with_graphs_and_without(job: Job, doubles: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "MEASURED", "dates")
    monkeypatch.setattr(latency, "PRECISIONS", ("fp32",))
    monkeypatch.setattr(latency, "measure", lambda session: decodes.measure(session, SMALL))
    monkeypatch.setattr(decodes, "NEW_TOKENS", 5)
    monkeypatch.setattr(job, "engine", lambda *arguments, **more: "double")
    latency.latency(job, "tensorrt")
    latency.ort_latency(job, "cpu")
    found = checks(job.work / "found.jsonl")
    assert {check["status"] for check in found.values()} == {"passed"}, found
    for name in ("tensorrt fp32", "tensorrt fp32 without CUDA graphs", "ort cpu static fp32", "ort cpu concat fp32"):
        times = found[name]["numbers"]["latency_ms"]
        assert list(times) == ["batch 1, greedy", "batch 3, beam 2"]
        assert all(time > 0 for time in times.values())
    assert "fp32: equal tokens with and without CUDA graphs" in found


@pytest.mark.parametrize("compiled", [False, True])
def test_the_eager_model_is_measured(monkeypatch: pytest.MonkeyPatch, compiled: bool) -> None:
    # The compiler itself takes minutes on a CPU; what it is given and how it is called is what counts here.
    monkeypatch.setattr(torch, "compile", lambda step, dynamic: step)
    monkeypatch.setattr(latency, "MEASURED", "tiny")
    monkeypatch.setattr(decodes, "NEW_TOKENS", 3)
    session = latency.eager_session("fp32", "cpu", compiled=compiled)
    assert len(decodes.measure(session, SMALL)) == 2


def test_sessions_are_compared_from_threads(dates_bundle: Path) -> None:
    bundle = open_bundle(dates_bundle)
    opened = [open_session(bundle, "ort", OpenOptions(form=form, threads=1)) for form in ("static", "concat")]
    sessions.together(opened)

    class Wrong:
        """A session that reads other tokens once it was asked for each task alone."""

        def __init__(self) -> None:
            self.inner, self.calls = opened[0], 0

        def batch(self, width: int = 1) -> Any:
            self.calls += 1
            batch, wrong = self.inner.batch(width), self.calls > 6
            add = batch.add
            batch.add = lambda ids, mask, prompts: add(np.where(mask & wrong, 7, ids), mask, prompts)
            return batch

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    with pytest.raises(AssertionError, match="threads get other tokens"):
        sessions.together([Wrong()])
    for session in opened:
        session.close()


def test_polygraphy_compares_the_encoder(dates_bundle: Path, tmp_path: Path) -> None:
    pytest.importorskip("polygraphy")
    from polygraphy.backend.onnxrt import OnnxrtRunner, SessionFromOnnx

    def runner(path: Path) -> Any:
        return OnnxrtRunner(SessionFromOnnx(str(path / "encoder.onnx"), providers=["CPUExecutionProvider"]))

    spec = open_bundle(dates_bundle).manifest.spec
    parity.compare_runners(dates_bundle, runner(dates_bundle), spec)
    changed = tmp_path / "changed"
    changed.mkdir()
    weights = bytearray((dates_bundle / "weights.safetensors").read_bytes())
    header = 8 + int.from_bytes(weights[:8], "little")
    begin, end = json.loads(weights[8:header])["enc.layers.0.ffn.fc1.weight"]["data_offsets"]
    weights[header + begin : header + end] = bytes(end - begin)
    (changed / "weights.safetensors").write_bytes(weights)
    (changed / "encoder.onnx").write_bytes((dates_bundle / "encoder.onnx").read_bytes())
    with pytest.raises(AssertionError, match="Polygraphy finds a difference"):
        parity.compare_runners(dates_bundle, runner(changed), spec)


def test_refusals_are_told_from_what_is_taken(tmp_path: Path) -> None:
    def refuse(words: str) -> None:
        raise ValueError(words)

    assert refusals.raised(lambda: refuse("one line"), ValueError) == "one line"
    with pytest.raises(AssertionError, match="nothing was refused"):
        refusals.raised(lambda: None, ValueError)
    with pytest.raises(AssertionError, match="more than one line"):
        refusals.raised(lambda: refuse("two\nlines"), ValueError)
    (tmp_path / "plan").write_bytes(b"\0" * 9)
    refusals.flip(tmp_path / "plan")
    assert (tmp_path / "plan").read_bytes() == b"\0\0\0\0\1\0\0\0\0"


def test_damaged_engines_are_refused(job: Job, doubles: None, once: Once) -> None:
    pytest.importorskip("tensorrt_rtx")
    source = once("verify-model", lambda path: save_model(tiny.model(VARIANTS["post"], dtype=torch.float32), path))
    foreign = once("verify-bundle", lambda path: export_bundle(str(source), path, ExportConfig(), verify=False))
    job.copy("tiny-fp32", foreign, engines=False)
    refusals.refusals(job, "tensorrt-rtx")
    found = checks(job.work / "found.jsonl")
    assert {check["status"] for check in found.values()} == {"passed"}, found
    assert "requests that are too large" in found
