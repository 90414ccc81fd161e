"""Where ONNX Runtime's CUDA provider computes, and what a step of a decoder costs the host, without a GPU.

The library is the real one, CUDA below it is a stub: see stub.c. Counts may fall; one that grows is a change for the
worse, of the graphs, the session or the library.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from tests.conftest import DATES
from tests.runtime.ort.cuda_stub.conftest import StubGpu
from tfexport.contract import Device, Variant
from tfexport.export import export_bundle
from tfexport.export.config import ExportConfig
from tfexport.precision import Precision

VARIANTS: tuple[Variant, ...] = ("static", "concat")
Once = Callable[[str, Callable[[Path], object]], Path]
# Sums on shapes. No number of the model, and no copy between host and device: those a step has are counted below.
ON_CPU = {
    "encoder": {"Squeeze": 1, "Concat": 1},
    "concat": {"Squeeze": 2, "Add": 1, "Concat": 3},
    "static": {"Squeeze": 4, "Mul": 1, "Div": 1, "Concat": 4, "Reshape": 1},
    "reorder": {},
}
# What a step uploads are tokens and lengths, what it downloads candidates, their logits and the normalizer. An operator
# on the CPU that reads numbers of the model would add a download and an upload.
STEP = {"uploads": 2, "downloads": 3, "host_copies": 0, "fills": 0, "waits": 9}
COSTS: dict[tuple[Precision, Variant], dict[str, int]] = {
    ("fp32", "static"): {"kernels": 54, "products": 17, "device_copies": 29},
    ("fp16", "static"): {"kernels": 57, "products": 17, "device_copies": 29},
    ("bf16", "static"): {"kernels": 57, "products": 17, "device_copies": 29},
    ("fp32", "concat"): {"kernels": 42, "products": 25, "device_copies": 28},
    ("fp16", "concat"): {"kernels": 51, "products": 25, "device_copies": 28},
    ("bf16", "concat"): {"kernels": 51, "products": 25, "device_copies": 28},
}


@pytest.fixture(scope="session")
def dates_bf16(once: Once) -> Path:
    config = ExportConfig(precision="bf16", variants=("concat", "static"))
    return once("dates-bf16", lambda path: export_bundle(str(DATES), path, config, verify=False))


@pytest.fixture(scope="session", params=["fp32", "fp16", pytest.param("bf16", marks=pytest.mark.slow)])
def bundle(request: pytest.FixtureRequest) -> tuple[Precision, Path]:
    names = {"fp32": "dates_bundle", "fp16": "dates_fp16", "bf16": "dates_bf16"}
    return request.param, request.getfixturevalue(names[request.param])


@pytest.mark.parametrize("variant", VARIANTS)
def test_only_shapes_leave_the_gpu_and_no_count_grows(
    variant: Variant, stub_gpu: StubGpu, bundle: tuple[Precision, Path]
) -> None:
    precision, path = bundle
    found = take_step(stub_gpu, path, variant)
    for graph, operators in found["on_cpu"].items():
        assert_below(operators, ON_CPU[variant if graph == "decoder" else graph])
    assert_below(found["step"], STEP | COSTS[precision, variant])


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_second_gpu_computes_all(variant: Variant, stub_gpu: StubGpu, dates_fp16: Path) -> None:
    first, second = (take_step(stub_gpu, dates_fp16, variant, device)["step"] for device in ("cuda:0", "cuda:1"))
    assert first.pop("on_second") == 0
    assert second.pop("on_second") == first["kernels"] + first["products"]
    assert second == first


def test_a_gpu_that_is_not_there_is_named(stub_gpu: StubGpu, dates_fp16: Path) -> None:
    done = stub_gpu.run("-c", f"import tfexport; tfexport.load({str(dates_fp16)!r}, device='cuda:2')")
    assert "ort: device is cuda:2, the last GPU is cuda:1; check CUDA_VISIBLE_DEVICES" in done.stderr


@pytest.mark.slow
def test_a_version_without_static_kernels_runs_concat_with_a_warning(
    stub_gpu_of: Callable[[str], StubGpu], dates_bundle: Path, dates_fp16: Path
) -> None:
    """1.26.0, which leaves Cast and Reshape of opset 24 on the CPU, and in fp32 TensorScatter too."""
    gpu = stub_gpu_of("1.26.0")
    for bundle, operators in ((dates_fp16, "Cast, Reshape"), (dates_bundle, "Reshape, TensorScatter, Transpose")):
        code = f"import tfexport; print(tfexport.load({str(bundle)!r}, device='cuda', variant=%r).session.variant)"
        done = gpu.run("-c", code % None)
        assert (done.returncode, done.stdout) == (0, "concat\n"), done.stderr
        problem = f"has no CUDAExecutionProvider kernel for {operators} and would compute that on the CPU; "
        assert (
            f"{problem}runs the concat decoder variant instead; update onnxruntime-gpu to 1.30 or newer" in done.stderr
        )
        done = gpu.run("-c", code % "static")
        assert done.returncode == 1
        assert f"PlacementError: ort: decoder_static.onnx: onnxruntime 1.26.0 {problem}" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("version", ["1.28.0", "1.30.0"])
def test_versions_for_cuda_13_place_both_variants(
    version: str, stub_gpu_of: Callable[[str], StubGpu], bundle: tuple[Precision, Path]
) -> None:
    for variant in VARIANTS:
        found = take_step(stub_gpu_of(version), bundle[1], variant)
        for graph, operators in found["on_cpu"].items():
            assert set(operators) <= {"Add", "Concat", "Div", "Mul", "Reshape", "Squeeze"}, graph


def take_step(gpu: StubGpu, bundle: Path, variant: Variant, device: Device = "cuda") -> dict[str, Any]:
    done = gpu.run("-m", "tests.runtime.ort.cuda_stub.step", str(bundle), variant, device)
    # 1.31 warns of each graph that is opened on a device by number.
    assert done.returncode == 0, done.stderr
    assert device != "cuda" or not done.stderr
    return cast(dict[str, Any], json.loads(done.stdout))


def assert_below(found: dict[str, int], most: dict[str, int]) -> None:
    assert {name: number for name, number in found.items() if number > most.get(name, 0)} == {}
