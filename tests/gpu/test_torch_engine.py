"""What the GPU's side of the double consists of, as far as there is none: strictness, counts, and whole decodes."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.gpu import torch_engine
from tests.gpu.test_engine_double import HOST, Place, PlacedModel, decodes, failed_capture
from tests.gpu.torch_engine import OWNED, GpuEngine, WatchedCuda
from tests.tensorrt.cuda_double import MisuseError
from tfexport.errors import BackendError
from tfexport.tensorrt import cuda

DONE, CAPTURE_REFUSED = SimpleNamespace(value=0, name="cudaSuccess"), SimpleNamespace(value=900, name="refused")


class HostRuntime:
    """The functions of the CUDA runtime that `Cuda` calls, on host memory, at once; nothing can be captured."""

    cudaStreamNonBlocking, cudaEventDisableTiming, cudaHostAllocDefault = 1, 2, 0  # noqa: N815
    cudaMemcpyKind = SimpleNamespace(  # noqa: N815
        cudaMemcpyHostToDevice=1, cudaMemcpyDeviceToHost=2, cudaMemcpyDeviceToDevice=3
    )
    cudaStreamCaptureMode = SimpleNamespace(cudaStreamCaptureModeThreadLocal=1)  # noqa: N815

    def __init__(self) -> None:
        self._memory: dict[int, Any] = {}
        self._handles = itertools.count(1)

    def cudaMalloc(self, num_bytes: int) -> tuple[Any, int]:  # noqa: N802
        raw = np.full(num_bytes + 256, 0xFF, np.uint8)
        address = -(-raw.ctypes.data // 256) * 256
        self._memory[address] = raw
        return DONE, address

    def cudaFree(self, address: int) -> tuple[Any]:  # noqa: N802
        self._memory.pop(address)[:] = 0xFF
        return (DONE,)

    def cudaHostAlloc(self, num_bytes: int, flags: int) -> tuple[Any, int]:  # noqa: N802
        return self.cudaMalloc(num_bytes)

    cudaFreeHost = cudaFree  # noqa: N815

    def cudaMemcpyAsync(self, to: int, source: int, num_bytes: int, how: int, stream: int) -> tuple[Any]:  # noqa: N802
        ctypes.memmove(to, source, num_bytes)
        return (DONE,)

    def cudaMemcpy2DAsync(  # noqa: N802
        self, to: int, pitch: int, source: int, source_pitch: int, width: int, rows: int, how: int, stream: int
    ) -> tuple[Any]:
        for row in range(rows):
            ctypes.memmove(to + row * pitch, source + row * source_pitch, width)
        return (DONE,)

    def cudaMemsetAsync(self, address: int, value: int, num_bytes: int, stream: int) -> tuple[Any]:  # noqa: N802
        ctypes.memset(address, value, num_bytes)
        return (DONE,)

    def cudaStreamBeginCapture(self, stream: int, mode: int) -> tuple[Any]:  # noqa: N802
        return (CAPTURE_REFUSED,)

    def cudaGetErrorString(self, code: Any) -> tuple[Any, bytes]:  # noqa: N802
        return DONE, b"not here"

    def __getattr__(self, name: str) -> Any:
        if name in OWNED:
            return lambda *given: (DONE, next(self._handles))
        return lambda *given: (DONE,)


class Stream:
    """What PyTorch takes for its current stream."""

    cuda_stream = 0

    @contextlib.contextmanager
    def enter(self, handle: int) -> Iterator[None]:
        before, self.cuda_stream = self.cuda_stream, handle
        try:
            yield
        finally:
            self.cuda_stream = before


class Pool:
    """A pool of memory that nobody but its context uses."""

    in_use: Any = None

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        assert Pool.in_use is None
        Pool.in_use = self
        try:
            yield
        finally:
            Pool.in_use = None


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put host memory where the GPU's would be, and nothing where PyTorch asks for a GPU."""
    stream = Stream()
    monkeypatch.setattr(cuda, "need_gpu", lambda: None)
    monkeypatch.setattr(cuda.Cuda, "__init__", lambda self: setattr(self, "_runtime", HostRuntime()))
    monkeypatch.setattr(torch_engine, "torch_stream", stream.enter)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "MemPool", Pool)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", Pool.use)
    monkeypatch.setattr(GpuEngine, "device", "cpu")

    def over_memory(address: int, num_bytes: int) -> torch.Tensor:
        return torch.from_numpy(np.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), np.uint8))

    monkeypatch.setattr(torch_engine, "over_memory", over_memory)


@pytest.fixture
def watched(on_host: None) -> WatchedCuda:
    return WatchedCuda()


def test_only_live_device_memory_is_seen(watched: WatchedCuda) -> None:
    first, pinned = watched.allocate(512), watched.pinned((8,), np.int64)
    seen = watched.view(first + 256, 256, on_device=True)
    assert (seen.data_ptr(), seen.shape) == (first + 256, (256,))
    assert watched.view(first + 256, 256, on_device=True) is seen, "none is made in a capture"
    assert [watched.is_device(first + place) for place in (-1, 0, 511, 512)] == [False, True, True, False]
    assert not watched.is_device(pinned.ctypes.data)
    for address, num_bytes, on_device in ((first + 256, 257, True), (7, 1, True), (first, 1, False)):
        with pytest.raises(MisuseError, match="no live device memory"):
            watched.view(address, num_bytes, on_device=on_device)
    watched.free(first)
    with pytest.raises(MisuseError, match="no live device memory"):
        watched.view(first + 256, 256, on_device=True)
    with pytest.raises(MisuseError, match="nobody allocated"):
        watched.free(first)


def test_what_is_made_is_freed_or_counted(watched: WatchedCuda) -> None:
    assert watched.is_empty
    made = watched.allocate(8), watched.stream(), watched.event()
    assert (watched.is_empty, watched.device_bytes) == (False, 8)
    watched.free(made[0])
    watched.destroy_stream(made[1])
    assert (watched.is_empty, watched.device_bytes) == (False, 0)
    watched.destroy_event(made[2])
    watched.synchronize(made[1])
    assert (watched.is_empty, watched.counts["synchronize"]) == (True, 1)


def test_what_pytorch_queues_on_another_stream_is_refused(watched: WatchedCuda) -> None:
    stream, done = watched.stream(), []
    with torch_engine.torch_stream(stream):
        watched.enqueue(stream, lambda: done.append(stream))
    with pytest.raises(MisuseError, match="another stream"):
        watched.enqueue(stream, lambda: done.append(0))
    assert done == [stream]


@pytest.mark.parametrize("form", ["static", "concat"])
def test_whole_decodes_as_far_as_captures(on_host: None, dates_bundle: Path, form: Any) -> None:
    """Everything of the GPU's side but CUDA itself: here no capture begins, so every step is queued anew."""
    place = Place(WatchedCuda, GpuEngine, GpuEngine, lambda: None, lambda: 0)
    decodes(PlacedModel(dates_bundle, place), form)
    if form == "static":
        failed_capture(PlacedModel(dates_bundle, place))


def test_what_pytorch_refuses_the_context_refuses(on_host: None, dates_bundle: Path) -> None:
    class Failing(GpuEngine):
        def run(self, arrays: Any) -> None:
            raise RuntimeError("operation not permitted\nwhen stream is capturing")

    model = PlacedModel(dates_bundle, HOST)
    with pytest.raises(BackendError, match="encoder failed: encoder: operation not permitted when stream is capturing"):
        model.started(model.trt(kind=Failing, cuda=WatchedCuda()), 2)
    assert Pool.in_use is None
