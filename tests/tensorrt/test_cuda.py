"""Test the layer over cuda-python: errors without a GPU, and copies and graphs with one."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.tensorrt.conftest import no_gpu
from tfexport.errors import BackendError
from tfexport.tensorrt import cuda
from tfexport.tensorrt.cuda import Cuda, Gpu, find_gpus, need_gpu

runtime = pytest.importorskip("cuda.bindings.runtime")
has_gpu = bool(find_gpus())


class FakeDriver:
    """Answers as `cuda.bindings.driver` does on a machine with two GPUs."""

    CUDA_VERSION = 13000
    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR="major", CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR="minor"
    )

    def __init__(self, **answers: Any) -> None:
        self.answers = {
            "cuInit": (),
            "cuDriverGetVersion": (13010,),
            "cuDeviceGetCount": (2,),
            "cuDeviceTotalMem": (1 << 34,),
            **answers,
        }

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> tuple[Any, ...]:
            if name == "cuDeviceGet":
                return self.code(), arguments[0]
            if name == "cuDeviceGetName":
                return self.code(), f"GPU {arguments[1]}".encode().ljust(arguments[0], b"\0")
            if name == "cuDeviceGetAttribute":
                return self.code(), {"major": 8, "minor": 9}[arguments[0]]
            answer = self.answers[name]
            return (self.code(answer),) if isinstance(answer, str) else (self.code(), *answer)

        return call

    @staticmethod
    def code(name: str = "CUDA_SUCCESS") -> Any:
        return SimpleNamespace(name=name, value=int(name != "CUDA_SUCCESS"))


def test_gpus_are_listed() -> None:
    assert cuda._list_gpus(FakeDriver()) == [Gpu(i, f"GPU {i}", "8.9", 1 << 34, "13.1") for i in range(2)]


@pytest.mark.parametrize(
    ("runs", "bindings", "problem"),
    [
        (
            12040,
            13000,
            "the driver supports CUDA 12.4 and cuda-python is for CUDA 13; install a driver for CUDA 13, or .*",
        ),
        (11080, 12090, "the driver supports CUDA 11.8 and cuda-python is for CUDA 12; install a driver for CUDA 12"),
        (12040, 12090, None),
        (13010, 12090, None),
    ],
)
def test_a_driver_older_than_cuda_python_is_no_gpu(
    monkeypatch: pytest.MonkeyPatch, runs: int, bindings: int, problem: str | None
) -> None:
    driver = FakeDriver(cuDriverGetVersion=(runs,))
    monkeypatch.setattr(driver, "CUDA_VERSION", bindings, raising=False)
    monkeypatch.setattr("cuda.bindings.driver", driver)
    gpus = find_gpus()
    if problem is None:
        assert len(gpus) == 2
        return
    assert gpus == []
    with pytest.raises(BackendError, match=f"^cuda: no GPU can be used here: {problem}$"):
        need_gpu()


@no_gpu
def test_a_driver_that_is_too_old_for_a_call_has_the_same_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "need_gpu", lambda number: None)
    with pytest.raises(BackendError, match=r"cudaErrorInsufficientDriver.*; install a driver for CUDA 13, or pip inst"):
        Cuda().stream()


def test_an_error_of_the_driver_gives_the_reason() -> None:
    with pytest.raises(BackendError, match=r"^cuInit failed with CUDA_ERROR_SYSTEM_DRIVER_MISMATCH$"):
        cuda._list_gpus(FakeDriver(cuInit="CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"))


@no_gpu
def test_without_a_gpu_the_reason_is_reported() -> None:
    assert find_gpus() == []
    for call in (need_gpu, Cuda):
        with pytest.raises(BackendError, match=r"^cuda: no GPU can be used here: "):
            call()


def test_without_cuda_python_nothing_is_found() -> None:
    code = (
        "import sys; sys.modules['cuda'] = None\n"
        "from tfexport.tensorrt.cuda import find_gpus, need_gpu\n"
        "assert find_gpus() == []\n"
        "need_gpu()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "cuda-python is not installed; pip install 'cuda-python>=12.6'" in done.stderr


def test_every_function_that_is_called_exists() -> None:
    names = set(re.findall(r'"(cuda[A-Z]\w+)"', inspect.getsource(cuda)))
    kinds = {name for name in names if name.startswith(("cudaMemcpyHost", "cudaMemcpyDevice"))}
    errors = {name for name in names if name.startswith("cudaError")}
    called = names - kinds - errors
    assert len(called) > 15
    assert not {name for name in called if not hasattr(runtime, name)}
    assert not {name for name in kinds if not hasattr(runtime.cudaMemcpyKind, name)}
    assert not {name for name in errors if not hasattr(runtime.cudaError_t, name)}


@pytest.mark.parametrize(
    ("code", "remedy"),
    [("cudaErrorMemoryAllocation", "a smaller --max-batch"), ("cudaErrorIllegalAddress", "restart the process")],
)
def test_an_error_of_cuda_names_function_cause_and_remedy(
    monkeypatch: pytest.MonkeyPatch, code: str, remedy: str
) -> None:
    monkeypatch.setattr(cuda, "need_gpu", lambda number: None)
    device, error = Cuda(), SimpleNamespace(name=code, value=2)
    device._runtime = SimpleNamespace(
        cudaMalloc=lambda size: (error, None),
        cudaMemGetInfo=lambda: (error, None, None),
        cudaGetErrorString=lambda code: (None, b"out of memory"),
    )
    with pytest.raises(BackendError, match=rf"cudaMalloc failed with {code} \(out of memory\) while .*{remedy}"):
        device.allocate(8)


def test_an_allocation_that_fails_states_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "need_gpu", lambda number: None)
    device, error = Cuda(1), SimpleNamespace(name="cudaErrorMemoryAllocation", value=2)
    device._runtime = SimpleNamespace(
        cudaMalloc=lambda size: (error, None),
        cudaMemGetInfo=lambda: (SimpleNamespace(value=0), 3_000_000, 9_000_000),
        cudaGetErrorString=lambda code: (None, b"out of memory"),
    )
    assert device.memory() == (3_000_000, 9_000_000)
    with pytest.raises(BackendError, match="on cuda:1, which has 3 of 9 MB free"):
        device.allocate(8)


def test_a_gpu_is_current_in_a_block_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "need_gpu", lambda number: None)
    current, success = [0], SimpleNamespace(value=0)
    double: Any = SimpleNamespace(
        cudaGetDevice=lambda: (success, current[-1]),
        cudaSetDevice=lambda number: (current.append(number), (success,))[1],
    )
    one, two = Cuda(1), Cuda(2)
    one._runtime = two._runtime = double
    with pytest.raises(ZeroDivisionError), one.current(), one.current():
        with two.current():
            assert current[-1] == 2
        _ = 1 / 0
    assert current == [0, 1, 2, 1, 0], "as it was for a caller's own use of CUDA"


def test_a_gpu_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_probe", lambda: (["first", "second"], ""))
    assert need_gpu(1) == "second"
    with pytest.raises(BackendError, match=r"device is cuda:2, the last GPU is cuda:1"):
        need_gpu(2)


@pytest.mark.parametrize("fails", ["in the block", "cudaStreamEndCapture", "cudaGraphInstantiate"])
def test_a_capture_that_fails_is_ended_and_its_error_cleared(monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    """Otherwise the stream stays in its capture, and the next call returns the error."""
    called: list[str] = []

    def function(name: str, value: Any) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            called.append(name)
            code = SimpleNamespace(name="cudaErrorStreamCaptureInvalidated", value=901 if name == fails else 0)
            return code, None if code.value else value

        return call

    values = {"cudaStreamBeginCapture": None, "cudaStreamEndCapture": 7, "cudaGraphInstantiate": 8}
    values |= {"cudaGraphDestroy": None, "cudaGetLastError": None}
    functions = {name: function(name, value) for name, value in values.items()}
    monkeypatch.setattr(cuda, "need_gpu", lambda number: None)
    device = Cuda()
    errors = SimpleNamespace(cudaGetErrorString=lambda code: (None, b"invalidated"))
    mode = SimpleNamespace(cudaStreamCaptureMode=runtime.cudaStreamCaptureMode)
    monkeypatch.setattr(device, "_runtime", SimpleNamespace(**vars(errors), **vars(mode), **functions))
    with pytest.raises(BackendError), device.capture(1):
        if fails == "in the block":
            raise BackendError("refused")
    ended = {
        "in the block": ["cudaStreamEndCapture", "cudaGraphDestroy"],
        "cudaStreamEndCapture": ["cudaStreamEndCapture"],
        "cudaGraphInstantiate": ["cudaStreamEndCapture", "cudaGraphInstantiate", "cudaGraphDestroy"],
    }
    assert called == ["cudaStreamBeginCapture", *ended[fails], "cudaGetLastError"]


@pytest.mark.gpu
@pytest.mark.skipif(not has_gpu, reason="no GPU")
def test_copies_and_graphs_on_a_gpu() -> None:
    device = Cuda()
    stream, event = device.stream(), device.event()
    given, back = device.pinned((4,), np.int64), device.pinned((4,), np.int64)
    one, two = device.allocate(32), device.allocate(32)
    assert one % 256 == 0
    with device.capture(stream) as graph:
        device.upload(one, given, stream)
        device.copy(two, one, 32, stream)
        device.clear(one, 32, stream)
        device.download(back, two, stream)
    for start in (0, 10):
        given[:] = np.arange(start, start + 4)
        device.launch(graph, stream)
        device.record(event, stream)
        device.wait(event)
        assert back.tolist() == list(range(start, start + 4))
    device.download(back, one, stream)
    device.synchronize(stream)
    assert back.tolist() == [0] * 4
    with pytest.raises(BackendError, match="cudaStreamSynchronize"), device.capture(stream):
        device.synchronize(stream)
    device.upload(one, given, stream)
    device.synchronize(stream)
    device.destroy_graph(graph)
    device.destroy_event(event)
    device.destroy_stream(stream)
    for address in (one, two):
        device.free(address)
    for array in (given, back):
        device.unpin(array)
    with pytest.raises(BackendError, match="cudaErrorMemoryAllocation"):
        device.allocate(1 << 50)
