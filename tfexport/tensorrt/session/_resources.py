"""Share engines, a stream, device memory and pinned arrays within a replica."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from tfexport.contract import ModelSpec, TensorSpec, Variant
from tfexport.errors import BackendError
from tfexport.precision import ITEM_BYTES
from tfexport.tensorrt.config import STEP, EngineLimits, Shape, concatenates, updates_in_place
from tfexport.tensorrt.cuda import Cuda
from tfexport.tensorrt.session._engine import Context, Engine, Use

Array = NDArray[Any]
Bytes = NDArray[np.uint8]

ALIGNMENT = 256  # of a tensor on the device; see setTensorAddress


def shape_of(tensor: TensorSpec, sizes: Mapping[str, int]) -> Shape:
    return tuple(dim if isinstance(dim, int) else sizes[dim] for dim in tensor.shape)


def bytes_of(tensor: TensorSpec, sizes: Mapping[str, int]) -> int:
    return math.prod(shape_of(tensor, sizes)) * ITEM_BYTES[tensor.dtype]


def packed(tensors: Iterable[TensorSpec], sizes: Mapping[str, int]) -> np.dtype[np.void]:
    """Return the layout of tensors in one buffer, so that one copy moves them all."""
    fields: dict[str, Any] = {}
    end = 0
    for tensor in tensors:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        fields[tensor.name] = ((tensor.dtype, shape_of(tensor, sizes)), start)
        end = start + bytes_of(tensor, sizes)
    formats, offsets = zip(*fields.values(), strict=True)
    return np.dtype({"names": list(fields), "formats": formats, "offsets": offsets, "itemsize": end})


def part(buffer: Bytes, layout: np.dtype[np.void], name: str) -> Array:
    """Return a view of a packed tensor in a host buffer of at least the layout's size."""
    found: Array = buffer[: layout.itemsize].view(layout)[name][0]
    return found


def offsets(layout: np.dtype[np.void]) -> dict[str, int]:
    return {name: field[1] for name, field in (layout.fields or {}).items()}


class Memory:
    """Device memory by tensor name, zeroed; a buffer grows but never shrinks."""

    def __init__(self, cuda: Cuda, stream: int) -> None:
        self.num_bytes = 0
        self._cuda, self._stream = cuda, stream
        self._addresses: dict[str, int] = {}
        self._sizes: dict[str, int] = {}

    def __getitem__(self, name: str) -> int:
        return self._addresses[name]

    def reserve(self, sizes: Mapping[str, int]) -> bool:
        """Make room; return whether a buffer moved, which invalidates CUDA graphs."""
        short = {name: size for name, size in sizes.items() if size > self._sizes.get(name, -1)}
        is_reallocated = not self._addresses.keys().isdisjoint(short)
        for name, size in short.items():
            self._grow(name, size)
        return is_reallocated

    def exchange(self, one: str, other: str) -> None:
        for table in (self._addresses, self._sizes):
            table[one], table[other] = table[other], table[one]

    def close(self) -> None:
        while self._addresses:
            name, address = self._addresses.popitem()
            self.num_bytes -= self._sizes.pop(name)
            self._cuda.free(address)

    def _grow(self, name: str, size: int) -> None:
        address, held = self._cuda.allocate(max(size, 1)), self._sizes.get(name, 0)
        self._cuda.clear(address + held, size - held, self._stream)
        if name in self._addresses:
            self._cuda.copy(address, self._addresses[name], held, self._stream)
        self._cuda.synchronize(self._stream)
        if name in self._addresses:
            self._cuda.free(self._addresses[name])
        self.num_bytes += size - held
        self._addresses[name], self._sizes[name] = address, size


@dataclass(frozen=True)
class EngineSet:
    """Shared state of a session's replicas; `spec` has the precision of the engines."""

    engines: Mapping[str, Engine]  # by plan name
    spec: ModelSpec
    variant: Variant | None
    limits: EngineLimits
    cuda: Cuda
    capture_failed: threading.Event = field(default_factory=threading.Event)

    @property
    def concatenates(self) -> bool:
        return concatenates(self.spec, self.variant)

    @property
    def updates_in_place(self) -> bool:
        return updates_in_place(self.spec, self.variant)


class DeviceResources:
    """A stream and its memory; contexts of a profile share their activations."""

    def __init__(self, engines: EngineSet) -> None:
        # The activations of a prefill are allocated later, because they may be fifty times as large.
        self.engines, self.cuda = engines, engines.cuda
        self.stream = engines.cuda.stream()
        self.memory = Memory(engines.cuda, self.stream)
        self._owned = ExitStack()
        try:
            most = max(engine.activation_bytes(STEP) for engine in engines.engines.values())
            self.memory.reserve({f"activations {STEP}": most})
        except BackendError:
            self.close()
            raise

    def context(self, engine: str, profile: int = STEP, use: Use = "any shapes") -> Context:
        made = self.engines.engines[engine].context(profile, self.stream, use)
        self.lend_activations(made, engine, profile)
        return made

    def lend_activations(self, context: Context, engine: str, profile: int) -> None:
        """Set the activation memory, which may have moved, except that of a step."""
        name, num_bytes = f"activations {profile}", self.engines.engines[engine].activation_bytes(profile)
        self.memory.reserve({name: num_bytes})
        context.use_memory(self.memory[name], num_bytes)

    def event(self) -> int:
        event = self.cuda.event()
        self._owned.callback(self.cuda.destroy_event, event)
        return event

    def pinned(self, size: int, dtype: DTypeLike) -> Array:
        """Return a flat page-locked host array that `close` frees."""
        array = self.cuda.pinned((max(size, 1),), dtype)
        self._owned.callback(self.cuda.unpin, array)
        return array

    def synchronize(self) -> None:
        self.cuda.synchronize(self.stream)

    def close(self) -> None:
        """Free memory, events and stream; no work may be running."""
        self.memory.close()
        self._owned.close()
        self.cuda.destroy_stream(self.stream)
