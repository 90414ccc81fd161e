"""Test which engines can be used on which machines."""

from __future__ import annotations

import shlex
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from tests.bundle.made import CONTENT, another
from tests.tensorrt.artifact import stored
from tests.tensorrt.artifact.stored import L4, MACHINE, RTX, TENSORRT
from tfexport.bundle.bundle import Bundle
from tfexport.cli import main
from tfexport.tensorrt import compatibility
from tfexport.tensorrt.compatibility import Machine, explain, incompatibilities, rebuild_command, this_machine
from tfexport.tensorrt.config import EngineConfig


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return stored.make(tmp_path_factory.mktemp("bundles") / "bundle")


def at(**changes: Any) -> Machine:
    return replace(MACHINE, **changes)


def libraries(version: str) -> Machine:
    return at(libraries={"tensorrt": version, "tensorrt-rtx": version})


COMPATIBLE = replace(TENSORRT, version_compatible=True)
AMPERE = replace(TENSORRT, hardware_compatibility="ampere_plus")
SAME = replace(TENSORRT, hardware_compatibility="same_compute_capability")
RTX_4090 = replace(L4, name="NVIDIA GeForce RTX 4090")
A10 = replace(L4, name="NVIDIA A10", compute_capability="8.6")
T4 = replace(L4, name="Tesla T4", compute_capability="7.5")
A100 = replace(L4, name="NVIDIA A100", compute_capability="8.0")
MIG = replace(L4, name="NVIDIA L4 MIG 1g.6gb")
H200 = replace(L4, name="NVIDIA H200", compute_capability="9.0")


@pytest.mark.parametrize(
    ("config", "machine"),
    [
        (RTX, MACHINE),
        (RTX, at(gpu=RTX_4090)),
        (RTX, at(gpu=A10)),
        (RTX, at(system="Windows", architecture="AMD64")),
        (TENSORRT, MACHINE),
        (TENSORRT, at(gpu=replace(L4, index=1, driver_version="12.8"))),
        (COMPATIBLE, libraries("10.16.1.11")),
        (COMPATIBLE, libraries("11.0.0.114")),
        (AMPERE, at(gpu=A10)),
        (AMPERE, at(gpu=H200)),
        (SAME, at(gpu=RTX_4090)),
        (SAME, at(gpu=MIG)),
    ],
)
def test_a_compatible_engine_is_accepted(bundle: Bundle, config: EngineConfig, machine: Machine) -> None:
    assert incompatibilities(stored.manifest(bundle, config), bundle, machine) == []


@pytest.mark.parametrize(
    ("config", "machine", "message"),
    [
        (RTX, libraries("1.7.2.1"), "tensorrt-rtx version: built with 1.7.1.116, here is 1.7.2.1; build it again with"),
        (TENSORRT, libraries("10.13.4.1"), "tensorrt version: built with 10.13.3.9, here is 10.13.4.1;"),
        (COMPATIBLE, libraries("10.12.0.36"), "tensorrt version: built with 10.13.3.9, here is 10.12.0.36;"),
        (COMPATIBLE, libraries("12.0.0.1"), "here is 12.0.0.1;"),
        (RTX, at(libraries={"tensorrt": "10.13.3.9"}), "here is tensorrt installed; install it with: pip install"),
        (TENSORRT, at(libraries={}), "here is none installed; install it with: pip install 'tfexport[trt]'"),
        (RTX, at(gpu=A100), "compute capability: built with 8.6, 8.9, here is 8.0 (NVIDIA A100); build it again with"),
        (
            RTX,
            at(gpu=H200),
            "lists no support for compute capability 9.0, only for 7.5, 8.0, 8.6, 8.9, 12.0, 12.1; use ",
        ),
        (
            RTX,
            at(gpu=None),
            "GPU: built with 8.6, 8.9, here is none that can be used; run tfexport doctor",
        ),
        (TENSORRT, at(gpu=None), "GPU: built with NVIDIA L4 (8.9), here is none that can be used; run tfexport doctor"),
        (TENSORRT, at(gpu=MIG), "GPU: built with NVIDIA L4 (8.9), here is 8.9 (NVIDIA L4 MIG 1g.6gb); build it again"),
        (TENSORRT, at(gpu=RTX_4090), "GPU: built with NVIDIA L4 (8.9), here is 8.9 (NVIDIA GeForce RTX 4090);"),
        (AMPERE, at(gpu=T4), "GPU: built with NVIDIA L4 (8.9), compatible with ampere_plus, here is 7.5 (Tesla T4);"),
        (SAME, at(gpu=A10), "compatible with same_compute_capability, here is 8.6 (NVIDIA A10);"),
        (
            TENSORRT,
            at(system="Windows", architecture="AMD64"),
            "system: built with Linux x86_64, here is Windows",
        ),
    ],
)
def test_an_incompatible_engine_is_one_line_with_both_values(
    bundle: Bundle, config: EngineConfig, machine: Machine, message: str
) -> None:
    found = incompatibilities(stored.manifest(bundle, config), bundle, machine)
    assert len(found) == 1
    assert explain(found).startswith(message) or message in explain(found)
    assert "\n" not in explain(found)


@pytest.mark.parametrize("name", ["encoder.onnx", "weights.safetensors"])
def test_an_engine_of_other_files_is_refused(bundle: Bundle, tmp_path: Path, name: str) -> None:
    other = stored.make(tmp_path / "other", {**CONTENT, name: another(name)})
    (found,) = incompatibilities(stored.manifest(bundle), other, MACHINE)
    built, here = (each.manifest.files[name].sha256[:12] for each in (bundle, other))
    assert str(found) == f"{name}: built with sha256 {built}…, here is sha256 {here}…"
    assert f"tfexport trt {other.path} " in found.remedy


def test_another_tokenizer_changes_no_engine(bundle: Bundle, tmp_path: Path) -> None:
    """Older engines list it among their sources."""
    manifest = stored.manifest(bundle)
    assert "tokenizer.json" in manifest.sources
    other = stored.make(tmp_path / "other", {**CONTENT, "tokenizer.json": b"something else"})
    assert not incompatibilities(manifest, other, MACHINE)


def test_every_reason_is_given_at_once_and_every_remedy_once(bundle: Bundle, tmp_path: Path) -> None:
    changed = {name: another(name) for name in ("encoder.onnx", "weights.safetensors")}
    other = stored.make(tmp_path / "other", CONTENT | changed)
    machine = replace(libraries("10.1.0.27"), system="Windows", gpu=T4)
    text = explain(incompatibilities(stored.manifest(bundle, TENSORRT), other, machine))
    for field in ("encoder.onnx: ", "weights.safetensors: ", "tensorrt version: ", "system: ", "GPU: "):
        assert text.count(field) == 1
    assert text.count("build it again with: tfexport trt") == 1


@pytest.mark.parametrize(
    "config",
    [
        RTX,
        replace(
            TENSORRT,
            weights="int8",
            max_batch=8,
            min_shapes="source_ids:1x4",
            opt_shapes="source_ids:4x8,target_ids:4x1",
            max_shapes="source_ids:8x16",
            workspace_mib=512,
            builder_optimization_level=0,
            version_compatible=True,
            hardware_compatibility="ampere_plus",
        ),
        replace(RTX, capacities=(4, 8, 16)),
        EngineConfig(),
    ],
)
def test_the_build_command_has_the_same_options(config: EngineConfig, tmp_path: Path) -> None:
    bundle = tmp_path / "a bundle's name"
    words = shlex.split(rebuild_command(bundle, config))
    assert words[:2] == ["tfexport", "trt"]
    parameters = main.commands["trt"].make_context("trt", words[2:]).params
    options = {field.name: parameters.pop(field.name) for field in fields(EngineConfig)}
    assert EngineConfig(**options) == config
    assert parameters.pop("bundle") == bundle
    assert {name for name, value in parameters.items() if value} == {"force"}


def test_the_remedy_names_this_gpu_if_it_has_a_name(bundle: Bundle) -> None:
    """Hopper: TensorRT-RTX builds for it as the local GPU, and for no other GPU at the same time."""

    def rebuilt(built: tuple[str, ...], here: str) -> list[str]:
        engine = stored.manifest(bundle, replace(RTX, compute_capabilities=built))
        (found,) = incompatibilities(engine, bundle, at(gpu=replace(L4, compute_capability=here)))
        words = shlex.split(found.remedy)
        return [words[i + 1] for i, word in enumerate(words) if word == "--compute-capability"]

    on_hopper = stored.manifest(bundle, replace(RTX, compute_capabilities=("9.0",)))
    assert not incompatibilities(on_hopper, bundle, at(gpu=replace(L4, compute_capability="9.0")))
    assert rebuilt(("8.6", "8.9"), "12.0") == ["8.6", "8.9", "12.0"]
    assert rebuilt(("9.0",), "8.9") == ["8.9"]
    assert rebuilt(("8.6", "8.9"), "9.0") == ["9.0"]
    assert rebuilt(("7.5", "8.6"), "8.9") == ["7.5", "8.6", "8.9"]


def test_an_engine_is_built_again_on_the_gpu_that_refused_it(bundle: Bundle) -> None:
    engine = stored.manifest(bundle, TENSORRT)
    (found,) = incompatibilities(engine, bundle, at(gpu=replace(A10, index=1)))
    assert found.field == "GPU"
    assert "--device cuda:1 " in found.remedy
    assert "--device" not in rebuild_command(bundle.path, TENSORRT, L4)


def test_a_machine_has_the_chosen_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compatibility, "find_gpus", lambda: [L4, A10])
    assert [this_machine(number).gpu for number in range(3)] == [L4, A10, None]


def test_this_machine_is_described_without_a_library() -> None:
    code = (
        "import sys; from tfexport.tensorrt.compatibility import this_machine; machine = this_machine();"
        "print(machine.system, sorted({'tensorrt', 'tensorrt_rtx', 'torch', 'onnx'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"{this_machine().system} []\n"
