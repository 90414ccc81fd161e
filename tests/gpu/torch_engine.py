"""Replace TensorRT's engines by PyTorch's graphs on the real CUDA.

Each context has its own memory, which its first run fills, so that a captured run allocates nothing and its graph
shares memory with nobody.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.gpu.torch_graph import TorchGraph
from tests.tensorrt.cuda_double import MisuseError
from tests.tensorrt.session.trt_double import ExecutionContextAllocationStrategy, FakeContext, FakeEngine, Shape
from tfexport.contract import TensorSpec
from tfexport.tensorrt.cuda import Cuda, CudaGraph

# Names of counts by function of CUDA.
COUNTED = {
    "cudaGraphInstantiate": "capture",
    "cudaGraphLaunch": "launch",
    "cudaStreamSynchronize": "synchronize",
    "cudaEventSynchronize": "wait",
}
# Functions that create something, and those that free it.
OWNED = {
    "cudaMalloc": "cudaFree",
    "cudaHostAlloc": "cudaFreeHost",
    "cudaStreamCreateWithFlags": "cudaStreamDestroy",
    "cudaEventCreateWithFlags": "cudaEventDestroy",
    "cudaGraphInstantiate": "cudaGraphExecDestroy",
}


class TorchEngine(FakeEngine):
    """An `ICudaEngine` whose graph PyTorch runs, on the host memory of a `CudaDouble`."""

    device = "cpu"

    def load(self, graph: Path | bytes) -> TorchGraph:
        return TorchGraph(graph, self.device)

    def array(self, tensor: TensorSpec, shape: Shape, address: int) -> Tensor:
        num_bytes = int(np.prod(shape)) * self.itemsize(tensor)
        memory = self.cuda.view(address, num_bytes, on_device=True)
        flat = torch.from_numpy(memory) if isinstance(memory, np.ndarray) else memory
        return flat.view(getattr(torch, tensor.dtype)).view(shape)

    def run(self, arrays: Mapping[str, Any]) -> None:
        inputs = {name: torch.as_tensor(arrays[name]) for name in self.inputs}
        for name, found in self._graph.run(inputs).items():
            if found.data_ptr() != arrays[name].data_ptr():  # caches are written in place
                arrays[name].copy_(found)


class GpuContext(FakeContext):
    """An `IExecutionContext` on the GPU."""

    def __init__(self, engine: FakeEngine) -> None:
        super().__init__(engine, replays_itself=False)
        self._pool = torch.cuda.MemPool()

    def execute_async_v3(self, stream_handle: int) -> bool:
        try:
            with torch_stream(stream_handle), torch.cuda.use_mem_pool(self._pool):
                return super().execute_async_v3(stream_handle)
        except RuntimeError as error:
            return self._refuse(" ".join(str(error).split()))


class GpuEngine(TorchEngine):
    """An `ICudaEngine` whose graph PyTorch runs on the GPU."""

    device = "cuda"

    def load(self, graph: Path | bytes) -> TorchGraph:
        loaded = super().load(graph)
        torch.cuda.synchronize()  # weights go up on another stream than those that read them
        return loaded

    def create_execution_context(self, strategy: Any) -> GpuContext | None:
        if self.cuda.is_capturing or strategy is not ExecutionContextAllocationStrategy.USER_MANAGED:
            return None
        self.cuda.counts["context"] += 1
        return GpuContext(self)


class WatchedCuda(Cuda):
    """The real CUDA with the checks of addresses and the counts of its double."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._calls: Counter[str] = Counter()
        self._sizes: dict[int, int] = {}  # of device memory, by address
        self._views: dict[tuple[int, int], Tensor] = {}
        self._capturing = threading.local()
        self._lock = threading.RLock()

    @property
    def device_bytes(self) -> int:
        with self._lock:
            return sum(self._sizes.values())

    @property
    def is_empty(self) -> bool:
        return all(self._calls[made] == self._calls[freed] for made, freed in OWNED.items())

    @property
    def is_capturing(self) -> bool:
        return getattr(self._capturing, "is_on", False)

    def allocate(self, num_bytes: int) -> int:
        address = super().allocate(num_bytes)
        with self._lock:
            self._sizes[address] = num_bytes
        return address

    def free(self, address: int) -> None:
        with self._lock:
            if self._sizes.pop(address, None) is None:
                raise MisuseError(f"{address:#x} is freed, which was not allocated")
            self._views = {place: view for place, view in self._views.items() if self._owner(place[0]) is not None}
        super().free(address)

    def is_device(self, address: int) -> bool:
        with self._lock:
            return self._owner(address) is not None

    def view(self, address: int, num_bytes: int, *, on_device: bool) -> Tensor:
        """Return device memory, which must be live and large enough, uint8 [num_bytes]."""
        with self._lock:
            start = self._owner(address)
            if not on_device or start is None or address + num_bytes > start + self._sizes[start]:
                raise MisuseError(f"{num_bytes} bytes at {address:#x} are no live device memory")
            if (address, num_bytes) not in self._views:  # made by the first run: none is made in a capture
                self._views[address, num_bytes] = over_memory(address, num_bytes)
            return self._views[address, num_bytes]

    def enqueue(self, stream: int, work: Callable[[], None]) -> None:
        """Run work of PyTorch, whose current stream `GpuContext` sets."""
        if torch.cuda.current_stream().cuda_stream != stream:
            raise MisuseError("PyTorch is on another stream")
        work()

    @contextmanager
    def capture(self, stream: int) -> Iterator[CudaGraph]:
        with torch_stream(stream):
            pass  # so that this thread has its handle before
        self._capturing.is_on = True
        try:
            with super().capture(stream) as graph:
                yield graph
        finally:
            self._capturing.is_on = False

    def _owner(self, address: int) -> int | None:
        return next((start for start, size in self._sizes.items() if start <= address < start + size), None)

    def _call(self, name: str, *arguments: Any, doing: str = "") -> Any:
        found = super()._call(name, *arguments, doing=doing)
        with self._lock:
            self._calls[name] += 1
            if name in COUNTED:
                self.counts[COUNTED[name]] += 1
        return found


@contextmanager
def torch_stream(handle: int) -> Iterator[None]:
    """Let PyTorch queue on a stream; create cuBLAS's handle and workspace, which outlive every context."""
    with torch.cuda.stream(torch.cuda.ExternalStream(handle)):
        torch.cuda.current_blas_handle()
        yield


def over_memory(address: int, num_bytes: int) -> Tensor:
    """Return a tensor over device memory that it does not own, uint8 [num_bytes]."""
    if not num_bytes:
        return torch.empty(0, dtype=torch.uint8, device="cuda")
    interface = {"shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 3}
    owner = type("Memory", (), {"__cuda_array_interface__": interface})()
    return torch.as_tensor(owner, device="cuda")
