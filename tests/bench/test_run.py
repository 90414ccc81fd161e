"""`tfexport bench` in new processes: parity, files, bad input, interruption."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tfexport.verify
from tests.bench import test_report as reports
from tests.command import TFEXPORT, ran, refuses, run
from tfexport.bench.config import BenchConfig
from tfexport.bench.run import bench_bundle, run_process
from tfexport.bundle.bundle import open_bundle
from tfexport.errors import BenchError


@pytest.fixture(scope="session")
def measured(once: Callable[[str, Callable[[Path], object]], Path], dates_bundle: Path) -> Path:
    """Measure models/dates for real: report.json, page.html and the table in `said`."""

    def make(path: Path) -> None:
        path.mkdir()
        files = ("--json", path / "report.json", "--html", path / "page.html")
        sizes = "--scenario sweep --batch-size 1,3 --source-length 5 --target-length 4 --threads 2 --num-beams 2"
        effort = "--processes 2 --duration 0.1 --no-verify"
        result = ran("bench", dates_bundle, *sizes.split(), *effort.split(), *files, code=2)
        (path / "said").write_text(result.stdout)

    return once("measured", make)


@pytest.fixture
def canned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let processes answer without being started; lists the number of each."""
    started: list[int] = []

    def answer(bundle: Path, config: BenchConfig, texts: object, number: int) -> dict[str, Any]:
        started.append(number)
        cell = reports.samples([0.001, 0.001]).to_dict()
        return {"backend": "ort", "threads": 1, "cells": [cell for _ in config.cells]}

    monkeypatch.setattr("tfexport.bench.run.run_process", answer)
    return started


def with_parity(source: Path, target: Path, passed: bool | None) -> Path:
    shutil.copytree(source, target)
    parity = None if passed is None else {"passed": passed}
    manifest = dataclasses.replace(open_bundle(source).manifest, parity=parity, provenance=None)
    (target / "manifest.json").write_bytes(manifest.to_bytes())
    return target


# ---- measured for real


def test_a_real_run_writes_report_and_page(measured: Path, dates_bundle: Path) -> None:
    found = json.loads((measured / "report.json").read_text())
    reports.check_schema(found)
    assert found["bundle"] == {"name": "dates", "sha256": open_bundle(dates_bundle).sha256, "precision": "fp32"}
    assert found["settings"]["backend"] == "ort"
    assert (found["settings"]["threads"], found["environment"]["threads"]) == (2, 2)
    assert found["validity"]["reasons"][0] == "parity was not checked (omit --no-verify)"
    assert [cell["batch_size"] for cell in found["cells"]] == [1, 3]
    for cell in found["cells"]:
        metrics = cell["metrics"]
        assert metrics["output_sequence_length"]["value"] == 4
        assert metrics["input_sequence_length"]["value"] == 5
        assert len(metrics["output_token_throughput"]["per_process"]) == len(cell["windows"]) == 2
        assert all(len(windows) >= 3 for windows in cell["windows"])
        assert 0 < metrics["time_to_first_token"]["min"] < metrics["request_latency"]["max"]
        assert all(0 <= share <= 1 for share in cell["time_split"].values())
        assert cell["time_split"]["reorder"] > 0
    assert found["metrics"]["load_to_first_token"]["value"] > found["metrics"]["load_time"]["value"] > 0
    assert 2e7 < 1e6 * found["metrics"]["peak_memory"]["value"] < 1e9
    assert (measured / "page.html").read_text().startswith("<!doctype html>")
    assert (measured / "said").read_text().startswith("dates · fp32 · ort · sweep · batch 1, 3 · source 5 · target 4")


def test_a_real_report_compares_with_itself(measured: Path) -> None:
    path = measured / "report.json"
    result = ran("bench", "compare", path, path, "--fail-if", "output_token_throughput<-5%")
    assert "+0.0 %" in result.stdout
    failed = ran(
        "bench", "compare", path, path, "--fail-if", "output_token_throughput<5%", "--fail-if", "load_time<1%", code=2
    )
    assert failed.stderr.startswith("error: bench compare: output_token_throughput.value changed by +0.0 % at 5/4/1")
    assert failed.stderr.count("changed by") == 3
    assert failed.stderr.count("\n") == 1


def test_an_error_of_a_process_is_reported_unchanged(dates_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "texts").write_text("1 May 2001\n" + "x" * 500 + "\n")
    refuses(run("bench", dates_bundle, "--input", tmp_path / "texts", "--no-verify"), "text 2")


# ---- parity


def test_the_verification_of_the_export_is_accepted(dates_bundle: Path, tmp_path: Path, canned: list[int]) -> None:
    bundle = with_parity(dates_bundle, tmp_path / "bundle", passed=True)
    found = bench_bundle(bundle, BenchConfig())
    assert found["parity"] == {"passed": True, "source": "checked by its export"}
    assert canned == [0, 1, 2]
    assert run("bench", bundle).exit_code == 0


@pytest.mark.parametrize("passed", [False, None])
def test_a_bundle_that_fails_parity_is_not_timed(
    passed: bool | None, dates_bundle: Path, tmp_path: Path, canned: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failed:
        passed = False

        def problems(self) -> list[str]:
            return ["ort concat differs"]

    monkeypatch.setattr(tfexport.verify, "verify_bundle", lambda *_, **__: Failed())
    bundle = with_parity(dates_bundle, tmp_path / "bundle", passed)
    result = run("bench", bundle, "--json", tmp_path / "a.json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "parity" if passed is False else "ort concat differs" in result.stderr
    assert canned == []
    assert not (tmp_path / "a.json").exists()


def test_without_pytorch_the_error_names_the_remedy(
    dates_bundle: Path, canned: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object, **__: object) -> None:
        raise ModuleNotFoundError(name="torch")

    monkeypatch.setattr(tfexport.verify, "verify_bundle", missing)
    refuses(run("bench", dates_bundle), "needs torch", "--no-verify")
    assert canned == []


# ---- the command


def test_a_bundle_may_be_called_compare(
    dates_bundle: Path, tmp_path: Path, canned: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(dates_bundle, tmp_path / "compare")
    monkeypatch.chdir(tmp_path)
    for arguments in (("./compare", "--no-verify"), ("--no-verify", "compare")):
        result = ran("bench", *arguments, code=2)
        assert result.stdout.startswith("compare · fp32")
    refuses(run("bench", "compare"), "Missing argument 'FIRST'")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--scenario", "server"], "set --rate"),
        (["--scenario", "server", "--rate", "5", "--batch-size", "4"], "use --slots"),
        (["--scenario", "server", "--rate", "5", "--model", "dates"], "model is only valid with --url"),
        (
            ["--scenario", "server", "--rate", "5", "--url", "localhost:8000"],
            "expected an address such as http://127.0.0",
        ),
        (["--scenario", "server", "--rate", "5", "--url", "http://h:1", "--slots", "4"], "not valid with --url"),
        (["--goal-ms", "5"], "goal_ms is only valid in the server scenario"),
        (["--rate", "nan", "--scenario", "server"], "rate is nan"),
        (["--batch-size", "x"], "'x' is not a valid integer"),
        (["--scenario", "sweep", "--batch-size", "1,99999999999999999999"], "whole numbers of 64 bits"),
        (["--target-length", "17"], "the limit of the bundle is 16"),
        (["--json", "missing/a.json"], "cannot be written"),
        (["--json", "same", "--html", "./same"], "same file"),
    ],
)
def test_bad_input_is_refused_before_anything_is_measured(
    arguments: list[str],
    message: str,
    dates_bundle: Path,
    tmp_path: Path,
    canned: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    refuses(run("bench", dates_bundle, "--no-verify", *arguments), message)
    assert canned == []
    assert list(tmp_path.iterdir()) == []


def test_a_path_without_a_bundle_is_refused(tmp_path: Path, canned: list[int]) -> None:
    refuses(run("bench", tmp_path / "missing"), "there is no bundle")
    refuses(run("bench", "compare", tmp_path, tmp_path), "is not a plain file")
    assert canned == []


# ---- processes


@pytest.mark.parametrize(
    ("script", "message", "texts"), [("exit 3", "failed", None), ("kill -9 $$", "by signal 9", ["x" * 1000] * 2000)]
)
def test_the_death_of_a_process_is_one_error(
    script: str, message: str, texts: list[str] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "python"
    fake.write_text(f"#!/bin/sh\necho no such thing >&2\n{script}\n")
    fake.chmod(0o700)
    monkeypatch.setattr("tfexport._io.process.sys.executable", str(fake))
    with pytest.raises(BenchError, match=f"process 2 .*{message}"):
        run_process(tmp_path, BenchConfig(), texts, 1)


def children(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in path.read_text(encoding="utf-8").split()]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(condition: Callable[[], Any]) -> Any:
    """Return what the condition gives once it gives something; the limit only ends a test that would hang."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        if found := condition():
            return found
        time.sleep(0.02)
    raise AssertionError("it never happened")


@pytest.mark.skipif(not Path(f"/proc/self/task/{os.getpid()}/children").exists(), reason="needs /proc of Linux")
@pytest.mark.parametrize(("how", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_ending_the_command_ends_its_processes(how: int, code: int, dates_bundle: Path, tmp_path: Path) -> None:
    command = [TFEXPORT, "bench", str(dates_bundle), "--no-verify", "--duration", "500", "--json", str(tmp_path / "a")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            (child,) = wait_for(lambda: children(process.pid))
            process.send_signal(how)
            stdout, stderr = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, stdout) == (code, "")
    if how == signal.SIGINT:
        assert stderr.endswith("interrupted\n")
        assert list(tmp_path.iterdir()) == []
    wait_for(lambda: not is_alive(child))
