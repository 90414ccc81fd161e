"""Test which library is chosen, what it supports, its log, and that it is not called without a GPU."""

from __future__ import annotations

import subprocess
import sys
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.tensorrt.conftest import no_gpu
from tfexport.errors import BackendError, EngineError
from tfexport.tensorrt import _library as bridge
from tfexport.tensorrt._library import NAMED, PORTABLE, Library, Log, Logger, load_library, without_noise
from tfexport.tensorrt.config import Target

pytest.importorskip("tensorrt_rtx")

NOISE = "[checkMacros.cpp::catchCudaError::250] Error Code 1: Cuda Runtime (cudaError 35: driver version)"


def plain_tensorrt(**parts: Any) -> Library:
    """Return a library that builds on a GPU only, as far as its names go."""
    names: dict[str, Any] = {"IBuilderConfig": object, "LayerType": Enum("LayerType", ["CONSTANT"])}
    return Library("tensorrt", SimpleNamespace(**names, **parts), "10.0.1", Logger())


def test_the_library_is_loaded_once(rtx: Library) -> None:
    assert load_library("tensorrt-rtx") is load_library() is rtx
    assert rtx.version == rtx.trt.__version__
    assert "tensorrt-rtx" in bridge.installed_targets()


def test_a_second_library_in_one_process_is_refused(rtx: Library) -> None:
    with pytest.raises(BackendError, match=r"^tensorrt: tensorrt-rtx is already loaded, .*another proc"):
        load_library("tensorrt")


def test_tensorrt_is_preferred_if_it_can_run() -> None:
    both: tuple[Target, ...] = ("tensorrt", "tensorrt-rtx")
    assert bridge._choose(both, has_gpu=True) == "tensorrt"
    assert bridge._choose(both, has_gpu=False) == "tensorrt-rtx"
    assert bridge._choose(("tensorrt-rtx",), has_gpu=True) == "tensorrt-rtx"
    missing = r"no library is installed; pip install 'tfexport\[trt\]' .*pip install 'tfexport\[rtx\]'"
    with pytest.raises(BackendError, match=missing):
        bridge._choose((), has_gpu=False)
    with pytest.raises(BackendError, match=r"and there is none; .*pip install 'tfexport\[rtx\]'"):
        bridge._choose(("tensorrt",), has_gpu=False)


def load_elsewhere(folder: Path, target: str) -> str:
    """Load a library in a process where `folder` comes first; return what it prints."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from tfexport.tensorrt._library import load_library\n"
        "from tfexport.errors import BackendError\n"
        "try: print(load_library(sys.argv[2]).version)\n"
        "except BackendError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder), target], capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("", "the module tensorrt is incomplete, it has no Builder, Runtime, OnnxParser, ILogger, __version__"),
        ("raise OSError('libnvinfer.so.10: cannot open')", "cannot be loaded (libnvinfer.so.10: cannot open)"),
    ],
)
def test_a_module_without_its_library_has_its_own_error(tmp_path: Path, source: str, message: str) -> None:
    (tmp_path / "tensorrt.py").write_text(source)
    output = load_elsewhere(tmp_path, "tensorrt")
    assert message in output
    assert "pip install 'tfexport[trt]' --force-reinstall" in output


@no_gpu
def test_no_runtime_is_made_without_a_gpu(rtx: Library) -> None:
    with pytest.raises(BackendError, match="no GPU"):
        rtx.runtime(rtx.listen())


@no_gpu
def test_no_builder_of_tensorrt_is_made_without_a_gpu() -> None:
    def builder(log: object) -> None:
        raise AssertionError("the library was called")

    library = plain_tensorrt(Builder=builder)
    assert not library.builds_without_gpu
    with pytest.raises(BackendError, match="no GPU"):
        library.builder(library.listen())


def test_a_builder_that_cannot_be_made_gives_the_reason() -> None:
    """The bindings make a TypeError of a null pointer."""
    logger = Logger()

    def make(log: Logger) -> None:
        log.log(SimpleNamespace(name="ERROR"), "out of luck")
        raise TypeError("factory function returned nullptr")

    able = SimpleNamespace(IBuilderConfig=SimpleNamespace(num_compute_capabilities=0), Builder=make)
    library = Library("tensorrt-rtx", able, "9.9", logger)
    with pytest.raises(EngineError, match=r"tensorrt-rtx 9.9: cannot create a make: out of luck"):
        library.builder(library.listen())


def test_strong_typing_is_requested_by_name(rtx: Library) -> None:
    """The number of the flag is 1 in TensorRT 10 and 0 in 11, where 1 is something else."""
    assert rtx.strongly_typed() == 1
    flags = Enum("NetworkDefinitionCreationFlag", {"EXPLICIT_BATCH": 0, "STRONGLY_TYPED": 1}, type=int)
    assert plain_tensorrt(NetworkDefinitionCreationFlag=flags).strongly_typed() == 2


def test_types_are_spelled_as_in_the_contract(rtx: Library) -> None:
    types = rtx.trt.DataType
    spelled = [rtx.dtype_name(dtype) for dtype in (types.FLOAT, types.HALF, types.BF16, types.INT64, types.BOOL)]
    assert spelled == ["float32", "float16", "bfloat16", "int64", "bool"]
    assert rtx.dtype_name(types.UINT8) == "UINT8"


def test_compute_capabilities_are_spelled_out(rtx: Library) -> None:
    assert set(PORTABLE) < set(NAMED) == set(rtx.compute_capabilities())
    assert plain_tensorrt().compute_capabilities() == {}


def provoke(library: Library) -> None:
    """Let the library report an error: a network without outputs."""
    builder = library.builder(library.listen())
    network = builder.create_network(library.strongly_typed())
    assert builder.build_serialized_network(network, builder.create_builder_config()) is None


def test_every_live_log_receives_later_errors(rtx: Library) -> None:
    provoke(rtx)
    early, late = rtx.listen(), rtx.listen()
    assert not late.records
    provoke(rtx)
    assert early.problems() == late.problems()
    (problem,) = late.problems()
    assert "Network must have at least one output" in problem
    late.records.clear()
    assert (late.problems(), late.reason()) == ([], "TensorRT gives no reason")
    before = len(rtx.logger._logs)
    del late
    assert len(rtx.logger._logs) == before - 1


def test_noise_is_left_out_and_errors_are_one_line_each() -> None:
    log = Log()
    log.records.extend(("ERROR", message) for message in (f"first\n  part\n{NOISE}", NOISE, "second", "second"))
    assert log.problems() == ["first part", "second"]
    assert log.reason() == "first part; second"
    assert without_noise(f"a\n{NOISE}\nb") == "a b"


def test_a_log_is_bounded_and_keeps_the_newest() -> None:
    logger = Logger()
    log = logger.listen()
    for number in range(bridge.MAX_RECORDS + 5):
        logger.log(SimpleNamespace(name="ERROR"), f"{number} " + "x" * 2 * bridge.MAX_MESSAGE)
    assert len(log.records) == bridge.MAX_RECORDS
    assert len(log.problems()) == bridge.MAX_ERRORS
    assert log.problems()[-1].startswith(f"{bridge.MAX_RECORDS + 4} ")
    assert max(len(message) for _, message in log.records) == bridge.MAX_MESSAGE
