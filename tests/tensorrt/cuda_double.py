"""Replace `tfexport.tensorrt.cuda.Cuda` by host memory, with strict checks.

Device memory begins as NaN. Queued work runs when somebody waits for it, so reading or overwriting too early gives
wrong values; with `prompt=True` it runs at once, so writing too late does. Addresses are checked when they are used.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tfexport.errors import BackendError

ALIGNMENT = 256
Bytes = NDArray[np.uint8]
Work = Callable[[], None]


class MisuseError(AssertionError):
    """Undefined behavior on a real GPU."""


@dataclass
class Allocation:
    address: int
    num_bytes: int
    on_device: bool
    memory: Bytes


@dataclass
class FakeGraph:
    handle: int
    work: list[Work] = field(default_factory=list)


@dataclass
class FakeStream:
    """Work in order; `queued` and `done` count it."""

    waiting: deque[Work] = field(default_factory=deque)
    queued: int = 0
    done: int = 0
    graph: FakeGraph | None = None
    lock: Any = field(default_factory=threading.RLock)

    def run(self, until: int) -> None:
        with self.lock:
            while self.done < until:
                work = self.waiting.popleft()
                self.done += 1
                work()


class CudaDouble:
    """The methods of `Cuda`, and counts of calls by name.

    Every thread has one current GPU, at first the first one. Calls for another GPU are refused.
    """

    thread: Any = threading.local()  # of all doubles

    def __init__(self, number: int = 0, *, prompt: bool = False) -> None:
        self.number = number
        self.counts: Counter[str] = Counter()
        self.limit = 1 << 40  # of device memory in bytes
        self._prompt = prompt
        self._handles = itertools.count(1000)
        self._allocations: dict[int, Allocation] = {}
        self._streams: dict[int, FakeStream] = {}
        self._events: dict[int, tuple[FakeStream, int] | None] = {}
        self._graphs: dict[int, FakeGraph] = {}
        self._lock = threading.RLock()
        self._capturing = threading.local()

    @classmethod
    def current_number(cls) -> int:
        return int(getattr(cls.thread, "number", 0))

    @contextmanager
    def current(self) -> Iterator[None]:
        former, self.thread.number = self.current_number(), self.number
        try:
            yield
        finally:
            self.thread.number = former

    def check_current(self) -> None:
        if self.current_number() != self.number:
            raise MisuseError(f"cuda:{self.number} is used while cuda:{self.current_number()} is the current GPU")

    # Memory

    @property
    def device_bytes(self) -> int:
        with self._lock:
            return sum(a.num_bytes for a in self._allocations.values() if a.on_device)

    @property
    def is_empty(self) -> bool:
        return not (self._allocations or self._streams or self._events or self._graphs)

    def memory(self) -> tuple[int, int]:
        self.check_current()
        return self.limit - self.device_bytes, self.limit

    def allocate(self, num_bytes: int) -> int:
        self._refuse_in_capture("cudaMalloc")
        if self.device_bytes + num_bytes > self.limit:
            raise BackendError(f"cuda: cudaMalloc failed with cudaErrorMemoryAllocation, {num_bytes} bytes")
        return self._allocate(num_bytes, on_device=True).address

    def free(self, address: int) -> None:
        self._release(address, on_device=True)

    def pinned(self, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        self._refuse_in_capture("cudaHostAlloc")
        kind = np.dtype(dtype)
        made = self._allocate(int(np.prod(shape)) * kind.itemsize, on_device=False)
        return made.memory.view(kind).reshape(shape)

    def unpin(self, array: NDArray[Any]) -> None:
        self._release(array.ctypes.data, on_device=False)

    def view(self, address: int, num_bytes: int, *, on_device: bool) -> Bytes:
        """Return memory, which must be live, large enough and of the right kind."""
        with self._lock:
            for made in self._allocations.values():
                start = address - made.address
                if start >= 0 and start + num_bytes <= made.num_bytes:
                    if made.on_device is not on_device:
                        break
                    return made.memory[start : start + num_bytes]
        kind = "device" if on_device else "pinned"
        raise MisuseError(f"{num_bytes} bytes at {address:#x} are no live {kind} memory")

    def is_device(self, address: int) -> bool:
        with self._lock:
            return any(
                a.on_device and a.address <= address < a.address + a.num_bytes for a in self._allocations.values()
            )

    def upload(self, address: int, array: NDArray[Any], stream: int) -> None:
        self._copy(address, array.ctypes.data, array, stream, to_device=True)

    def download(self, array: NDArray[Any], address: int, stream: int) -> None:
        self._copy(address, array.ctypes.data, array, stream, to_device=False)

    def copy(self, destination: int, source: int, num_bytes: int, stream: int) -> None:
        self.copy_2d(destination, num_bytes, source, num_bytes, 1, stream)

    def copy_2d(self, destination: int, pitch: int, source: int, source_pitch: int, num_rows: int, stream: int) -> None:
        def work() -> None:
            width = min(pitch, source_pitch)
            to, given = (
                self.view(address, num_rows * row, on_device=True).reshape(num_rows, row)[:, :width]
                for address, row in ((destination, pitch), (source, source_pitch))
            )
            if np.may_share_memory(to, given):
                raise MisuseError("a copy within the device overlaps itself")
            to[:] = given

        self.enqueue(stream, work)

    def clear(self, address: int, num_bytes: int, stream: int) -> None:
        def work() -> None:
            self.view(address, num_bytes, on_device=True)[:] = 0

        self.enqueue(stream, work)

    # Streams and events

    def stream(self) -> int:
        self.check_current()
        handle = next(self._handles)
        self._streams[handle] = FakeStream()
        return handle

    def enqueue(self, stream: int, work: Work) -> None:
        """Queue anything, or record it while the stream is captured."""
        self.check_current()
        found = self._streams[stream]
        with found.lock:
            if found.graph is not None:
                if getattr(self._capturing, "stream", None) != stream:
                    raise MisuseError("another thread queues on a stream that is being captured")
                found.graph.work.append(work)
                return
            found.waiting.append(work)
            found.queued += 1
            if self._prompt:
                found.run(found.queued)

    def synchronize(self, stream: int) -> None:
        self.counts["synchronize"] += 1
        self._refuse_in_capture("cudaStreamSynchronize")
        found = self._streams[stream]
        found.run(found.queued)

    def destroy_stream(self, stream: int) -> None:
        self.check_current()
        if self._streams.pop(stream).waiting:
            raise MisuseError("a stream is destroyed with work on it")

    def event(self) -> int:
        self.check_current()
        handle = next(self._handles)
        self._events[handle] = None
        return handle

    def record(self, event: int, stream: int) -> None:
        found = self._streams[stream]
        if found.graph is not None:
            raise MisuseError("an event is recorded in a capture")
        self._events[event] = (found, found.queued)

    def wait(self, event: int) -> None:
        self.counts["wait"] += 1
        self._refuse_in_capture("cudaEventSynchronize")
        recorded = self._events[event]
        if recorded:
            recorded[0].run(recorded[1])

    def destroy_event(self, event: int) -> None:
        self.check_current()
        del self._events[event]

    # Graphs

    @contextmanager
    def capture(self, stream: int) -> Iterator[FakeGraph]:
        found, graph = self._streams[stream], FakeGraph(next(self._handles))
        if found.graph is not None:
            raise MisuseError("a stream is captured twice at once")
        if found.waiting:
            raise MisuseError("a capture begins while the first run may still be preparing")
        found.graph, self._capturing.stream = graph, stream
        try:
            yield graph
        finally:
            found.graph = self._capturing.stream = None
        self.counts["capture"] += 1
        self._graphs[graph.handle] = graph

    def launch(self, graph: FakeGraph, stream: int) -> None:
        self._refuse_in_capture("cudaGraphLaunch")
        if self._graphs.get(graph.handle) is not graph:
            raise MisuseError("a graph is launched that was destroyed")
        self.counts["launch"] += 1
        for work in graph.work:
            self.enqueue(stream, work)

    def destroy_graph(self, graph: FakeGraph) -> None:
        self.check_current()
        del self._graphs[graph.handle]

    @property
    def is_capturing(self) -> bool:
        return getattr(self._capturing, "stream", None) is not None

    def _copy(self, address: int, host: int, array: NDArray[Any], stream: int, *, to_device: bool) -> None:
        if not array.flags.c_contiguous:
            raise MisuseError("a copy needs a contiguous array")

        def work() -> None:
            device = self.view(address, array.nbytes, on_device=True)
            pinned = self.view(host, array.nbytes, on_device=False)
            if to_device:
                device[:] = pinned
            else:
                pinned[:] = device

        if array.nbytes:
            self.enqueue(stream, work)

    def _allocate(self, num_bytes: int, *, on_device: bool) -> Allocation:
        raw = np.full(num_bytes + ALIGNMENT, 0xFF, np.uint8)
        start = -raw.ctypes.data % ALIGNMENT
        memory = raw[start : start + num_bytes]
        made = Allocation(memory.ctypes.data, num_bytes, on_device, memory)
        with self._lock:
            self._allocations[made.address] = made
        return made

    def _release(self, address: int, *, on_device: bool) -> None:
        self._refuse_in_capture("cudaFree")
        with self._lock:
            made = self._allocations.pop(address, None)
        if made is None or made.on_device is not on_device:
            raise MisuseError(f"{address:#x} is freed, which was not allocated")
        made.memory[:] = 0xFF

    def _refuse_in_capture(self, name: str) -> None:
        self.check_current()
        if self.is_capturing:
            raise BackendError(f"cuda: {name} failed with cudaErrorStreamCaptureUnsupported")


def read_host(address: int, count: int) -> list[int]:
    """Read int64 numbers of the host."""
    return list((ctypes.c_int64 * count).from_address(address))
