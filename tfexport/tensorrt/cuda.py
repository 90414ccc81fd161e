"""Access GPUs, memory, streams, events and CUDA graphs through cuda-python."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from tfexport._io.extras import install_command, older_cuda_command
from tfexport.contract import Device, device_parts
from tfexport.errors import BackendError, ConfigError

Array = NDArray[Any]
_UNUSABLE = "cuda: no GPU can be used here"
_CAPABILITY = "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY"


@dataclass(frozen=True)
class Gpu:
    """A GPU that CUDA_VISIBLE_DEVICES does not hide."""

    index: int
    name: str
    compute_capability: str
    memory_bytes: int
    driver_version: str  # newest CUDA version that the driver supports


def find_gpus() -> list[Gpu]:
    """List the GPUs without creating a CUDA context."""
    return _probe()[0]


def need_gpu(number: int = 0) -> Gpu:
    """Return a GPU; raise `BackendError` with the reason if it cannot be used."""
    gpus, reason = _probe()
    if not gpus:
        raise BackendError(f"{_UNUSABLE}: {reason}")
    if number >= len(gpus):
        raise BackendError(
            f"cuda: device is cuda:{number}, the last GPU is cuda:{len(gpus) - 1}; check CUDA_VISIBLE_DEVICES"
        )
    return gpus[number]


def choose_gpu(device: Device | None) -> Gpu | None:
    """Return the GPU to build on; None chooses the first one, if there is any."""
    if device is None:
        return next(iter(find_gpus()), None)
    kind, number = device_parts(device)
    if kind != "cuda":
        raise ConfigError(f"trt: device is {device}, expected a GPU such as 'cuda:1'; leave it out for the first one")
    return need_gpu(number)


@contextmanager
def on_gpu(gpu: Gpu | None) -> Iterator[None]:
    """Make a GPU the thread's current one in the block, if there is one."""
    with Cuda(gpu.index).current() if gpu else nullcontext():
        yield


def describe_gpus() -> tuple[list[dict[str, Any]], str]:
    """Return the fields of each GPU, and the reason if none can be used."""
    gpus, reason = _probe()
    return [asdict(gpu) for gpu in gpus], "" if gpus else f"{_UNUSABLE}: {reason}"


def _probe() -> tuple[list[Gpu], str]:
    try:
        from cuda.bindings import driver
    except ImportError:
        return [], f"cuda-python is not installed; {install_command('cuda')}"
    try:
        if problem := _version_problem(driver):
            return [], problem
        return _list_gpus(driver), "the driver finds none; check nvidia-smi and CUDA_VISIBLE_DEVICES"
    except BackendError as error:
        return [], f"{error}; check nvidia-smi and CUDA_VISIBLE_DEVICES"
    except RuntimeError:  # libcuda was not found
        return [], "the NVIDIA driver is not installed; install it or choose another backend"


def _ask(driver: Any, name: str, *arguments: Any) -> Any:
    code, *values = getattr(driver, name)(*arguments)
    if code.value:
        raise BackendError(f"{name} failed with {code.name}")
    return values[0] if values else None


def _version_problem(driver: Any) -> str | None:
    # With a driver older than cuda-python, every call of the runtime fails.
    supported, needed = _ask(driver, "cuDriverGetVersion"), driver.CUDA_VERSION // 1000
    if supported // 1000 >= needed:
        return None
    supports = f"the driver supports CUDA {_spell(supported)} and cuda-python is for CUDA {needed}"
    return f"{supports}; {_newer_driver(needed)}"


def _newer_driver(major: int) -> str:
    older = older_cuda_command(major)
    return f"install a driver for CUDA {major}{older and f', or {older}'}"


def _spell(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def _list_gpus(driver: Any) -> list[Gpu]:
    ask = functools.partial(_ask, driver)
    ask("cuInit", 0)
    version = _spell(ask("cuDriverGetVersion"))
    found = []
    for index in range(ask("cuDeviceGetCount")):
        device = ask("cuDeviceGet", index)
        name = ask("cuDeviceGetName", 256, device).split(b"\0")[0].decode(errors="replace")
        kinds = [getattr(driver.CUdevice_attribute, f"{_CAPABILITY}_{part}") for part in ("MAJOR", "MINOR")]
        capability = ".".join(str(ask("cuDeviceGetAttribute", kind, device)) for kind in kinds)
        found.append(Gpu(index, name, capability, int(ask("cuDeviceTotalMem", device)), version))
    return found


@dataclass
class CudaGraph:
    """A CUDA graph; its handle is 0 during the capture."""

    handle: int = 0


class Cuda:
    """The CUDA runtime on a GPU; raises `BackendError` if a call fails.

    Every thread has its own current GPU, so callers wrap their calls, and those of TensorRT, in `current`.

    Device memory, streams and events are integers; the caller frees them. Copies and launches are only queued on a
    stream. The memory that they use belongs to the device until the caller has waited for a later event.
    """

    def __init__(self, number: int = 0) -> None:
        need_gpu(number)
        from cuda.bindings import runtime

        self._runtime, self._number = runtime, number

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make this GPU the thread's current one in the block."""
        former = int(self._call("cudaGetDevice"))
        if former == self._number:
            yield
            return
        self._call("cudaSetDevice", self._number)
        try:
            yield
        finally:
            self._call("cudaSetDevice", former)

    def memory(self) -> tuple[int, int]:
        """Return the free and the total bytes of device memory."""
        free, total = self._call("cudaMemGetInfo")
        return int(free), int(total)

    def allocate(self, num_bytes: int) -> int:
        """Return the address of new device memory, aligned to 256 bytes."""
        return int(self._call("cudaMalloc", num_bytes, doing=f"allocating {num_bytes} bytes on the GPU"))

    def free(self, address: int) -> None:
        """Free device memory that no queued work uses."""
        self._call("cudaFree", address)

    def pinned(self, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        """Return a page-locked host array for asynchronous copies; `unpin` frees it."""
        kind = np.dtype(dtype)
        num_bytes = math.prod(shape) * kind.itemsize
        flags = self._runtime.cudaHostAllocDefault
        address = int(self._call("cudaHostAlloc", num_bytes, flags, doing=f"pinning {num_bytes} bytes of host memory"))
        memory = (ctypes.c_byte * num_bytes).from_address(address)
        return np.ndarray(shape, kind, buffer=memoryview(memory))

    def unpin(self, array: Array) -> None:
        """Free an array of `pinned`; the array and its views become invalid."""
        self._call("cudaFreeHost", array.ctypes.data)

    def upload(self, address: int, array: Array, stream: int) -> None:
        """Queue a copy of a contiguous pinned array to the device."""
        self._copy(address, array.ctypes.data, array.nbytes, "cudaMemcpyHostToDevice", stream)

    def download(self, array: Array, address: int, stream: int) -> None:
        """Queue a copy from the device to a contiguous pinned array."""
        self._copy(array.ctypes.data, address, array.nbytes, "cudaMemcpyDeviceToHost", stream)

    def copy(self, destination: int, source: int, num_bytes: int, stream: int) -> None:
        """Queue a copy within the device."""
        self._copy(destination, source, num_bytes, "cudaMemcpyDeviceToDevice", stream)

    def copy_2d(self, destination: int, pitch: int, source: int, source_pitch: int, num_rows: int, stream: int) -> None:
        """Queue a device copy of rows whose length changes; pitches are bytes per row."""
        how, width = self._runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice, min(pitch, source_pitch)
        self._call("cudaMemcpy2DAsync", destination, pitch, source, source_pitch, width, num_rows, how, stream)

    def clear(self, address: int, num_bytes: int, stream: int) -> None:
        """Queue filling device memory with zeros."""
        self._call("cudaMemsetAsync", address, 0, num_bytes, stream)

    def stream(self) -> int:
        """Create a stream that does not wait for the default stream."""
        return int(self._call("cudaStreamCreateWithFlags", self._runtime.cudaStreamNonBlocking))

    def synchronize(self, stream: int) -> None:
        """Wait for all work on a stream; raise `BackendError` if any of it failed."""
        self._call("cudaStreamSynchronize", stream)

    def destroy_stream(self, stream: int) -> None:
        """Free a stream."""
        self._call("cudaStreamDestroy", stream)

    def event(self) -> int:
        """Create an event without timestamps."""
        return int(self._call("cudaEventCreateWithFlags", self._runtime.cudaEventDisableTiming))

    def record(self, event: int, stream: int) -> None:
        """Queue an event after all work that is already on the stream."""
        self._call("cudaEventRecord", event, stream)

    def wait(self, event: int) -> None:
        """Wait for the newest record of an event, if any; raise if earlier work failed."""
        self._call("cudaEventSynchronize", event)

    def destroy_event(self, event: int) -> None:
        """Free an event."""
        self._call("cudaEventDestroy", event)

    @contextmanager
    def capture(self, stream: int) -> Iterator[CudaGraph]:
        """Capture the work that the block queues on a stream; the graph can run after it.

        The block must neither wait nor allocate. Other threads are not affected.
        """
        graph = CudaGraph()
        mode = self._runtime.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self._call("cudaStreamBeginCapture", stream, mode)
        try:
            yield graph
        except BaseException:
            # The stream is unusable until a failed capture ends.
            _, *made = self._runtime.cudaStreamEndCapture(stream)
            if made and made[0] and int(made[0]):
                self._runtime.cudaGraphDestroy(made[0])
            self._runtime.cudaGetLastError()  # otherwise the next call returns this error
            raise
        try:
            made = self._call("cudaStreamEndCapture", stream, doing="capturing a CUDA graph")
            try:
                graph.handle = int(self._call("cudaGraphInstantiate", made, 0))
            finally:
                self._call("cudaGraphDestroy", made)
        except BackendError:
            self._runtime.cudaGetLastError()
            raise

    def launch(self, graph: CudaGraph, stream: int) -> None:
        """Queue a captured graph."""
        self._call("cudaGraphLaunch", graph.handle, stream)

    def destroy_graph(self, graph: CudaGraph) -> None:
        """Free a graph that is not running."""
        self._call("cudaGraphExecDestroy", graph.handle)

    def _copy(self, destination: int, source: int, num_bytes: int, kind: str, stream: int) -> None:
        if num_bytes:
            how = getattr(self._runtime.cudaMemcpyKind, kind)
            self._call("cudaMemcpyAsync", destination, source, num_bytes, how, stream)

    def _call(self, name: str, *arguments: Any, doing: str = "") -> Any:
        code, *values = getattr(self._runtime, name)(*arguments)
        if not code.value:
            return (values[0] if len(values) == 1 else values) if values else None
        text = self._runtime.cudaGetErrorString(code)[1].decode(errors="replace")
        remedy = "restart the process; if it happens again, run it with CUDA_LAUNCH_BLOCKING=1 to see where"
        if code.name == "cudaErrorMemoryAllocation":
            remedy = "free memory, or build engines for less: a smaller --max-batch or --max-target-length"
        if code.name == "cudaErrorInsufficientDriver":
            remedy = _newer_driver(self._runtime.CUDART_VERSION // 1000)
        where = f" while {doing}" if doing else ""
        where += f" on cuda:{self._number}" if self._number else ""
        if name == "cudaMalloc":
            with suppress(BackendError):
                free, total = self.memory()
                where += f", which has {free / 1e6:,.0f} of {total / 1e6:,.0f} MB free"
        raise BackendError(f"cuda: {name} failed with {code.name} ({text}){where}; {remedy}")
