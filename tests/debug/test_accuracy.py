"""`tfexport trt --debug` names the layers of planted overflows, and the option that it prints mends them."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import tiny
from tests.command import ran, refuses, run
from tests.debug.planted import FC1, FC2, exported, planted
from tfexport.debug.accuracy import diagnose, error_of
from tfexport.tensorrt.config import EngineConfig
from tfexport.tensorrt.store import open_engine

pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed")

CONFIG = EngineConfig(target="tensorrt-rtx", compute_capabilities=("8.9",), max_batch=4)
RTX = ("--target", "tensorrt-rtx", "--compute-capability", "8.9", "--max-batch", "4")


@pytest.mark.parametrize("name", ["inner", "residual"])
def test_the_planted_model_overflows_in_pytorch_too(name: str) -> None:
    batch, model = tiny.batch(), planted(name)
    with torch.no_grad():
        assert model(*batch).isfinite().all()
        assert not model.half()(*batch).isfinite().all()


def test_debug_names_the_layer_and_its_command_mends_it(inner: Path) -> None:
    result = ran("trt", inner, *RTX, "--debug", code=2)
    first = next(line for line in result.stdout.splitlines() if line.startswith("First in encoder"))
    assert f" of {FC1}, " in first
    assert "65504" in first
    command = shlex.split(result.stdout.splitlines()[-1])
    assert [word for word in command if "ffn" in word] == [FC1, FC2]
    assert ran(*command[1:], "--debug").stdout.count("DIFFERS") == 0
    ran(*command[1:])
    manifest = open_engine(inner.resolve(), "tensorrt-rtx-static-fp16").manifest
    assert manifest.config.fp32_layers == (FC1, FC2)
    assert ran("trt", inner, *RTX, "--fp32-layers", "*.enc.layers.1.ffn.*", "--debug").stdout.count("DIFFERS") == 0


def test_the_report_has_every_number(inner: Path) -> None:
    found = json.loads(ran("trt", inner, *RTX, "--debug", "--json", code=2).stdout)
    assert (found["agrees"], found["fp32_layers"], found["limit"]) == (False, [FC1, FC2], 65504)
    assert [stage["stage"] for stage in found["stages"] if stage["error"] > found["tolerance"]] == ["encoder"]
    assert found["layers"][0]["layer"] == FC1
    assert found["layers"][0]["largest"] > 65504
    assert max(stage["error"] for stage in found["mended"]) < found["tolerance"]


@pytest.mark.slow
def test_an_overflow_that_stays_in_the_sum_of_layers(tmp_path: Path) -> None:
    found = diagnose(exported(tmp_path, "residual"), CONFIG)
    assert found.layers[0].layer == "model.enc.layers.0.ffn.fc2"
    assert found.fp32_layers
    assert {"model.enc.layers.0.ffn.fc2", "model.enc.layers.1.self.o", "model.enc.layers.1.ffn.fc2"} <= {
        *found.fp32_layers
    }
    assert all("dec." not in layer for layer in found.fp32_layers)
    assert max(stage.error for stage in found.mended) < found.tolerance


@pytest.mark.slow
def test_outputs_that_overflow_need_another_type(tmp_path: Path) -> None:
    bundle = exported(tmp_path, "outputs", "fp32")
    found = diagnose(bundle, replace(CONFIG, precision="fp16"))
    assert (found.agrees, found.fp32_layers, found.command) == (False, None, None)
    assert "use --precision bf16" in found.lines()[-1]
    assert diagnose(bundle, replace(CONFIG, precision="bf16")).agrees


def test_layers_that_do_not_exist_and_fp32_are_refused(inner: Path, dates_bundle: Path) -> None:
    refuses(run("trt", inner, *RTX, "--fp32-layers", "enc.*", "--dry-run"), "matches none", "model.enc")
    refuses(run("trt", dates_bundle, *RTX, "--fp32-layers", "*", "--dry-run"), "have the precision fp32")
    refuses(run("trt", inner, *RTX, "--debug", "--dry-run"), "exclude each other")


@pytest.mark.parametrize(
    ("expected", "got", "error"),
    [
        ([1.0, -4.0], [1.0, -3.0], 0.25),
        ([0.0], [0.0], 0.0),
        ([1.0], [np.nan], np.inf),
        ([1.0], [np.inf], np.inf),
        ([-np.inf, 2.0], [-np.inf, 2.0], 0.0),
    ],
)
def test_errors_are_shares_of_the_largest_value(expected: list[float], got: list[float], error: float) -> None:
    arrays: Any = np.array(expected), np.array(got, np.float16)
    assert error_of(*arrays) == error
