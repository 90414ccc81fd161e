"""Test the GPU acceptance without a GPU: skipped parts, reports, crashes."""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch._dynamo

from tests import tiny
from tests.conftest import ROOT
from tests.gpu import acceptance, behavior, decodes, latency, models, parity
from tests.gpu.job import Job, read_checks, read_lines
from tests.gpu.parts import PARTS, Part
from tests.gpu.torch_engine import TorchEngine
from tests.tensorrt.cuda_double import CudaDouble
from tests.tensorrt.session.trt_double import trt_session
from tfexport.bundle.bundle import open_bundle
from tfexport.doctor import Diagnosis, Library
from tfexport.nn.config import model_spec
from tfexport.nn.directory import load_model
from tfexport.nn.transformer import Transformer
from tfexport.runtime.eager import EagerSession
from tfexport.runtime.registry import LoadOptions, open_session
from tfexport.tensorrt.config import Target, default_capacities
from tfexport.tensorrt.cuda import find_gpus

Once = Callable[[str, Callable[[Path], object]], Path]
PART = PARTS[0]
SMALL = ((1, 1), (3, 2))


def machine() -> Diagnosis:
    libraries = (Library("numpy", "", "1.26", "2.0", ""),)
    return Diagnosis("0", "3.11", "Linux x86_64", (), "", libraries, (), (), ())


def checks(path: Path) -> dict[str, dict[str, Any]]:
    return {check["name"]: check for check in read_checks(path)}


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


def test_the_large_model_has_the_size_of_bart_large_cnn(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = Transformer(models.large_config())
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(406e6, rel=0.005)
    small = replace(models.large_config(), source_vocab=50, target_vocab=50, d_model=32, max_source_length=24)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "large_config", lambda: small)
        assert load_model(Path(models.source_of(models.LARGE, tmp_path))).config == small
        with models.large_decodes():
            assert decodes.spell(1, 4) == "bart-large-cnn, batch 1, beam 4"
            assert len(decodes.random_sources(model_spec(small, "fp32"), 2)[0]) == 24
    assert models.source_of("tiny", tmp_path) == "preset:tiny"


def test_what_matters_first_fits_four_runs_of_ten_minutes() -> None:
    first = PARTS[: [part.name for part in PARTS].index("engine-double")]
    for missing in get_args(Target):
        needed = [part for part in first if missing not in part.needs]
        assert sum(part.limit_s for part in needed) <= 4 * 540
        ends = dict(zip([part.name for part in needed], itertools.accumulate(p.limit_s for p in needed), strict=True))
        target = next(name for name in get_args(Target) if name != missing)
        first_run = ("primitives", "ort-cuda", "rtx-accepts", f"{target}-dates", "eager-latency-fp16")
        assert max(ends[name] for name in first_run if name in ends) <= 540
        assert max(ends[name] for name in ("ort-latency-fp16", f"{target}-latency-fp16")) <= 2 * 540
        assert max(end for name, end in ends.items() if name.startswith("large-")) <= 3.2 * 540


WORKER = """
import os, sys, time
from pathlib import Path
from tests.gpu.job import Job, read_checks, read_lines
job = Job(Path(os.environ["GPU_WORK"]), Path(os.environ["GPU_FOUND"]))
def fail(*_): raise ValueError("no")
def refuse(*_): raise KeyError("refused")
def crash(*_): os.kill(os.getpid(), 11)
def hang(*_): time.sleep(60)
def check(name, call=lambda numbers: numbers.update(time=time.time())): job.check(name, call, KeyError)
"""


def run_worker(tmp_path: Path, program: str, limit_s: int = 60) -> acceptance.Outcome:
    part = Part("part", "where", "what", limit_s, ())
    return acceptance.run_part(part, tmp_path, tmp_path / "work", 100, (sys.executable, "-c", WORKER + program))


@pytest.mark.parametrize(
    ("program", "status", "reason", "found"),
    [
        ("check('a')", "passed", "", ["passed"]),
        ("check('a'); check('b', fail); sys.exit(1)", "failed", "", ["passed", "failed"]),
        ("check('a', refuse)", "refused", "", ["refused"]),
        ("check('a'); check('b', crash)", "failed", "crashed with signal 11", ["passed", "failed"]),
        ("check('a'); print('the end'); sys.exit(3)", "failed", "exit code 3", ["passed"]),
        ("pass", "failed", "nothing was checked", []),
        ("check('a', hang)", "failed", "no check ended within 5 s", ["failed"]),
        ("check('a'); check('b', hang)", "unfinished", "stopped after 5 s", ["passed", "unfinished"]),
    ],
)
def test_a_part_that_fails_crashes_or_hangs_is_a_result(
    tmp_path: Path, program: str, status: str, reason: str, found: list[str]
) -> None:
    outcome = run_worker(tmp_path, program, 5 if "hang" in program else 60)
    assert (outcome.status, outcome.reason) == (status, reason)
    assert [check["status"] for check in outcome.checks] == found
    assert outcome.is_complete == (reason in ("", "nothing was checked"))
    assert ("the end" in outcome.tail) == ("the end" in program)


def test_warnings_of_a_machine_fail_no_part_and_profiles_end(tmp_path: Path) -> None:
    (tmp_path / "test_warns.py").write_text(
        "import os, warnings, pytest\n"
        "warnings.warn('of a newer library', DeprecationWarning)\n"
        "@pytest.mark.gpu\n"
        "def test_warns(): assert os.environ['TEARDOWN_CUPTI'] == '0'\n"
    )
    command = [*acceptance.WORKER, "-c", str(ROOT / "pyproject.toml"), str(tmp_path / "test_warns.py")]
    with (tmp_path / "log").open("wb") as log:
        assert acceptance.run_process(command, {}, log, 60) == 0, (tmp_path / "log").read_text()


def test_the_next_run_goes_on_after_the_checks_that_ended(tmp_path: Path) -> None:
    first = run_worker(tmp_path, "check('a'); check('b', crash); check('c')")
    with (tmp_path / "parts" / "part.jsonl").open("a") as file:
        file.write('{"name": "c", "sta')
    second = run_worker(tmp_path, "check('a', fail); check('b', crash); check('c'); check('d', crash)")
    third = run_worker(tmp_path, "[check(name, fail) for name in 'abcd']; check('e')")
    assert [check["status"] for check in first.checks] == ["passed", "failed"]
    assert [check["name"] for check in third.checks] == ["a", "b", "c", "d", "e"]
    assert third.checks[:2] == first.checks
    assert third.checks[2:4] == second.checks[2:4]
    assert third.checks[3]["detail"] == "crashed with signal 11"
    assert (first.is_complete, second.is_complete, third.is_complete) == (False, False, True)
    assert third.status == "failed"


def test_complete_parts_are_not_run_again_unless_they_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = (Part(name, "where", "what", 60, ()) for name in ("one", "two"))
    monkeypatch.setattr(acceptance, "PARTS", (one, two))
    monkeypatch.setattr(acceptance, "diagnose", machine)
    monkeypatch.setattr(acceptance, "skipped", lambda part: "")
    ran: list[str] = []

    def run_part(part: Part, output: Path, work: Path, left_s: float) -> acceptance.Outcome:
        ran.append(part.name)
        job = Job(work, acceptance.result_file(output, part))
        job.check("good", lambda numbers: numbers.update(run=len(ran)))
        job.check("bad", lambda numbers: {}["missing"])
        is_complete = part is one or len(ran) > 2
        return acceptance.Outcome(part.name, "what", "failed", "", 2.0, read_checks(job._found), "", is_complete)

    monkeypatch.setattr(acceptance, "run_part", run_part)
    arguments = ["--output", str(tmp_path / "output"), "--work", str(tmp_path / "work")]
    tmp_path.joinpath("work").mkdir()
    assert [acceptance.main(arguments) for _ in range(3)] == [1, 1, 1]
    assert ran == ["one", "two", "two"]
    acceptance.main([*arguments, "--only", "one"])
    assert ran[3:] == ["one"]
    report = json.loads((tmp_path / "output" / "report.json").read_text())
    assert [part["part"] for part in report["parts"]] == ["one", "two"]
    assert [part["seconds"] for part in report["parts"]] == [4.0, 4.0]
    lines = read_lines(tmp_path / "output" / "parts" / "one.jsonl")
    assert [(line["name"], line["status"]) for line in lines if line["status"] != "unfinished"] == [
        ("good", "passed"),
        ("bad", "failed"),
    ]
    assert lines[-1]["numbers"] == {}
    assert checks(tmp_path / "output" / "parts" / "one.jsonl")["good"]["numbers"] == {"run": 1}


def test_parts_after_the_time_limit_are_skipped(tmp_path: Path) -> None:
    deadline = time.monotonic() + acceptance.LEAST_S - 1
    known = acceptance.Outcome(PART.name, PART.what, "unfinished", "stopped after 9 s")
    outcomes = list(acceptance.run_parts(tmp_path, tmp_path, deadline, {PART.name: known}))
    assert outcomes[0] is known
    assert {(outcome.status, outcome.reason) for outcome in outcomes[1:]} == {("skipped", "out of time")}
    cut = acceptance.run_part(PART, tmp_path, tmp_path, 0.5, (sys.executable, "-c", "import time; time.sleep(60)"))
    assert (cut.status, cut.reason, cut.is_complete) == ("unfinished", "stopped after 0 s", False)


def check(name: str, status: str = "passed", detail: str = "", **numbers: Any) -> dict[str, Any]:
    return {"name": name, "status": status, "detail": detail, "seconds": 1.0, "numbers": numbers}


def test_the_report_has_reasons_and_numbers(tmp_path: Path) -> None:
    def step(backend: str, setting: str, **numbers: float) -> dict[str, Any]:
        return check(f"{backend}, {setting}", backend=backend, setting=setting, **numbers)

    refused = check("default", "refused", "UNSUPPORTED_CC | no")
    eager = [step("eager", "greedy", step_ms=1.0, step_bytes=100_000_000)]
    eager += [step("eager", "beam 4", step_ms=2.0, step_bytes=700_000_000)]
    ort = [step("ort", "greedy", step_ms=0.125, step_bytes=100_000_000), step("ort", "greedy", launches=223.0)]
    found = [
        acceptance.Outcome("rtx-accepts", "takes", "refused", checks=[refused]),
        acceptance.Outcome("primitives", "all", "passed", checks=[check("bandwidth", bandwidth_gb_s=4000)]),
        acceptance.Outcome("eager-latency-fp16", "ms", "passed", checks=eager),
        acceptance.Outcome("ort-latency-fp16", "ms", "failed", checks=ort, tail="Traceback"),
    ]
    outcomes = {outcome.part: outcome for outcome in found}
    acceptance.write(tmp_path, machine(), outcomes)
    text = (tmp_path / "report.md").read_text()
    assert "UNSUPPORTED_CC \\| no" in text
    assert "## Milliseconds a step\n\n| backend | greedy | beam 4 |" in text
    assert "| eager | 1.000 | 2.000 |\n| ort | 0.125 |  |" in text
    # 100 MB in 0.125 ms are 800 GB/s, a fifth of 4,000.
    assert "A decode with its encoder, divided by its steps." in text
    assert "## Percent of the measured 4000 GB/s" in text
    assert "| eager | 2 | 9 |\n| ort | 20 |  |" in text
    assert "## Kernels, copies and fills a step\n\n| backend | greedy |\n| --- | --- |\n| ort | 223 |" in text
    assert "| bandwidth | passed | 1.0 | bandwidth_gb_s 4000 |" in text
    assert "Traceback" in text
    assert json.loads((tmp_path / "report.json").read_text())["passed"] is False
    assert acceptance.read_outcomes(tmp_path) == outcomes


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
    monkeypatch.setattr(decodes, "SETTINGS", SMALL)
    monkeypatch.setattr(decodes, "LAUNCHES", SMALL)
    monkeypatch.setattr(decodes, "NEW_TOKENS", 5)
    monkeypatch.setattr(latency, "given_to_gpu", lambda call: (call(), 7)[1])


def test_latency_is_measured_with_graphs_and_without(
    job: Job, doubles: None, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latency, "MEASURED", "dates")
    job.copy("dates-fp32-latency", job.bundle("dates"), engines=False)
    built: list[dict[str, int]] = []
    monkeypatch.setattr(job, "engine", lambda *arguments, **more: (built.append(more), "double")[1])
    latency.latency(job, "tensorrt", "fp32")
    assert default_capacities(built[0]["max_target_length"]) == (64,), "one decoder to build, not several"
    latency.double_latency(job, "fp32", CudaDouble, TorchEngine)
    latency.ort_latency(job, "fp32", "cpu")
    found = checks(job.work / "found.jsonl")
    assert {check["status"] for check in found.values()} == {"passed"}, found
    assert list(found)[:7] == [
        "tensorrt fp32, batch 1, greedy",
        "tensorrt fp32, batch 3, beam 2",
        "tensorrt fp32: equal tokens with and without CUDA graphs",
        "tensorrt fp32 without CUDA graphs, batch 1, greedy",
        "tensorrt fp32 without CUDA graphs, batch 3, beam 2",
        "tensorrt fp32, batch 1, greedy: launches",
        "tensorrt fp32, batch 3, beam 2: launches",
    ], "nothing is profiled before all times are known"
    for backend in ("engine double fp32", "ort cpu static fp32", "ort cpu concat fp32"):
        for setting in ("batch 1, greedy", "batch 3, beam 2"):
            numbers = found[f"{backend}, {setting}"]["numbers"]
            assert (numbers["backend"], numbers["setting"]) == (backend, setting)
            assert numbers["step_ms"] > 0
            assert 0 < numbers["steps"] <= 5
            launches = found[f"{backend}, {setting}: launches"]["numbers"]
            assert launches == {"backend": backend, "setting": setting, "launches": 0.0}, "no more when longer"


def test_a_session_that_fails_is_the_failure_of_its_checks_and_no_other(
    job: Job, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latency, "MEASURED", "dates")
    job.copy("dates-fp32-latency", job.bundle("dates"), engines=False)
    monkeypatch.setattr(job, "engine", lambda *arguments, **more: "absent")
    latency.latency(job, "tensorrt", "fp32")
    found = checks(job.work / "found.jsonl")
    assert len({check["detail"] for check in found.values()}) == 1, found
    assert {check["status"] for check in found.values()} == {"failed"}
    assert not any("KeyError" in check["detail"] for check in found.values())


def test_the_eager_model_is_measured(job: Job, small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "MEASURED", "tiny")
    for precision in ("fp16", "fp32"):
        latency.eager_latency(job, precision, "cpu")
    found = checks(job.work / "found.jsonl")
    assert {check["status"] for check in found.values()} == {"passed"}, found
    read = [found[f"eager {name}, batch 1, greedy"]["numbers"]["step_bytes"] for name in ("fp16", "fp32")]
    assert read[1] == 2 * read[0]


def test_what_is_not_compiled_is_no_figure_of_the_compiler(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = {"layers": 1}
    model = tiny.model(tiny.config(encoder=one, decoder=one), dtype=torch.float32)
    compile_for = functools.partial(torch.compile, backend="eager")  # the default one takes minutes on a CPU
    monkeypatch.setattr(torch, "compile", compile_for)
    monkeypatch.setattr(
        latency, "eager_session", lambda *_: (EagerSession(model, model_spec(model.config, "fp32")), 1.0)
    )
    monkeypatch.setattr(decodes, "LAUNCHES", ())

    def measured(recompile_limit: int) -> dict[str, dict[str, Any]]:
        monkeypatch.setattr(torch._dynamo.config, "recompile_limit", recompile_limit)
        found = tmp_path / f"{recompile_limit}.jsonl"
        model.__dict__.pop("decode_step", None)
        latency.compile_latency(Job(tmp_path, found), "fp32", "cpu")
        return checks(found)

    # Enough for each setting, and too few for all of them.
    assert {check["status"] for check in measured(4).values()} == {"passed"}
    assert "recompile_limit" in measured(1)["torch.compile fp32, batch 1, greedy"]["detail"]


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
