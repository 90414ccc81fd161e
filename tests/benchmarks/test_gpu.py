"""The measurement of steps on a GPU, as the dry run on the CPU: what is said, what takes no part, limits, resuming."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result

from tests.conftest import ROOT
from tfexport.models.config import model_spec
from tfexport.models.presets import build_preset
from tfexport.runtime.eager import EagerSession

sys.path.insert(0, str(ROOT / "benchmarks"))

import gpu
from stepwise import cells, steps, trace
from stepwise.markdown import render


def run(output: Path, *options: str) -> Result:
    few = ("--device", "cpu", "--models", "tiny", "--precision", "fp32", "--rounds", "1")
    return CliRunner().invoke(gpu.main, ["--output", str(output), *few, *options])


def test_a_dry_run_compares_outputs_reports_and_goes_on(tmp_path: Path) -> None:
    options = ("--contenders", "eager,ort static,tensorrt-rtx", "--work", str(tmp_path / "work"))
    before = run(tmp_path, *options, "--batch-size", "1,3", "--minutes", "0")
    assert (before.exit_code, before.stderr) == (0, "0 minutes are over; go on with --resume\n")
    done = run(tmp_path, *options, "--batch-size", "1,3")
    assert done.exit_code == 0, done.output
    document = json.loads((tmp_path / "gpu.json").read_text())
    assert (document["schema"], document["gpu"]) == ("tfexport.gpu/1", None)
    assert [measured["cell"]["batch"] for measured in document["cells"]] == [1, 3]
    for measured in document["cells"]:
        assert measured["reference"] == "eager"
        assert [one["contender"] for one in measured["runs"]] == ["eager", "ort static"]
        assert list(measured["failures"]) == ["tensorrt-rtx"]
        assert "engines run on a GPU alone" in measured["failures"]["tensorrt-rtx"]
        for one in measured["runs"]:
            assert (one["equal"], one["equal_prefix"]) == (1, 1)
            assert 0 < one["low_ms"] <= one["step_ms"] <= one["high_ms"]
            assert one["bandwidth_share"] > 0
        eager, ort = measured["runs"]
        assert eager["step_bytes"] == ort["step_bytes"], "both read the same"
        assert eager["given"] > 10
        assert 0 < eager["busy_ms"] <= eager["traced_ms"]
        assert ort["busy_ms"] is None
    report = (tmp_path / "gpu.md").read_text()
    assert done.stdout == report
    assert report.startswith("**A dry run on the CPU")
    assert "## tiny fp32" in report
    assert "| tensorrt-rtx | tiny fp32 1, tiny fp32 3 |" in report

    again = run(tmp_path, *options, "--batch-size", "1,3", "--resume")
    assert (again.exit_code, again.stdout) == (0, report)
    assert "is there already; go on with it by --resume" in run(tmp_path, *options, "--batch-size", "1,3").output
    other = run(tmp_path, *options, "--batch-size", "1", "--resume")
    assert other.exit_code == 1
    assert "cannot be resumed: options was" in other.output


def test_what_takes_too_long_is_given_up_and_the_rest_goes_on(tmp_path: Path) -> None:
    done = run(tmp_path, "--contenders", "eager,ort concat", "--batch-size", "2", "--limit", "0.05")
    assert done.exit_code == 0, done.output
    (measured,) = json.loads((tmp_path / "gpu.json").read_text())["cells"]
    assert measured["runs"] == []
    assert measured["failures"] == dict.fromkeys(("eager", "ort concat"), "open took longer than 0.05 s")
    assert "open took longer than 0.05 s |" in done.stdout


@pytest.mark.slow  # torch.compile compiles
def test_the_compiled_step_says_what_the_eager_one_says(tmp_path: Path) -> None:
    done = run(tmp_path, "--contenders", "eager,torch.compile", "--batch-size", "2")
    assert done.exit_code == 0, done.output
    (measured,) = json.loads((tmp_path / "gpu.json").read_text())["cells"]
    assert [one["equal"] for one in measured["runs"]] == [1, 1], measured["failures"]
    eager, compiled = measured["runs"]
    assert compiled["given"] < eager["given"] / 2, "in one graph"


def test_steps_are_those_of_greedy_search() -> None:
    """Token by token what the whole forward pass finds best."""
    model = build_preset("tiny")
    spec = model_spec(model.config, "fp32")
    found = steps.tokens(EagerSession(model), 2)
    ids, mask = (torch.from_numpy(array) for array in cells.sources(spec, 2))
    target = torch.tensor([[spec.tokens.start, *row[:-1]] for row in found])
    with torch.no_grad():
        best = model(ids, mask, target).argmax(-1)
    assert best.tolist() == found
    assert len(found[0]) == min(32, spec.max_target_length)


def test_bytes_of_a_step_by_hand() -> None:
    spec = model_spec(build_preset("tiny").config, "fp16")
    token = 2 * spec.layers * spec.heads * (spec.head_dim + spec.value_dim)
    lengths = range(2, cells.num_steps(spec) + 1)  # of the rows in each step that is timed
    expected = token * 5 * (min(32, spec.max_source_length) + np.mean(lengths))
    assert cells.cache_bytes(spec, 5) == expected


def test_overlapping_spans_count_once() -> None:
    assert trace.covered([(5, 7), (0, 2), (1, 3), (1, 2), (7, 8)]) == 6
    assert trace.covered([]) == 0


def test_a_report_of_a_gpu() -> None:
    """The shape of what a GPU gives, with numbers that are none of its."""
    one: dict[str, Any] = {
        "contender": "ort static", "equal": 1.0, "equal_prefix": 1.0, "step_ms": 2.0, "low_ms": 1.5, "high_ms": 3.0,
        "cpu_ms": 2.5, "step_bytes": 10**9, "bandwidth": 4e12, "bandwidth_share": 0.125, "busy_ms": 0.5,
        "traced_ms": 5.0, "given": 223.4,
    }  # fmt: skip
    document = {
        "environment": {"cpu": "a CPU", "threads": 16, "system": "Linux", "date": "2026-11-23T", "versions": {}},
        "gpu": {"name": "a GPU", "driver_version": "13.0"}, "revision": "", "options": {"device": "cuda", "rounds": 7},
        "cells": [{
            "cell": {"model": "paper-base", "precision": "fp16", "batch": 8}, "reference": "eager",
            "runs": [{**one, "contender": "eager", "step_ms": 8.0}, one], "failures": {"tensorrt": "a | reason"},
        }],
    }  # fmt: skip
    report = render(document)
    assert "| 8 | ort static | 2.000 | 1.500 to 3.000 | 0.25 | 0.500 | 1.500 | 223 | 2.500 | 12% | 100% |" in report
    assert "| tensorrt | paper-base fp16 8 | a / reason |" in report
    assert "a GPU, driver 13.0, a CPU" in report
    assert "(4,000 to 4,000 GB/s)" in report
