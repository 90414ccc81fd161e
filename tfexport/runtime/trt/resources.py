"""The buffers of one replica: device memory by tensor name, and the pinned arrays that the host exchanges with it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from tfexport.runtime.session import Candidates, Floats, Ids
from tfexport.spec import DType, TensorSpec
from tfexport.trt.config import EngineLimits
from tfexport.trt.cuda import Cuda

Array = NDArray[Any]

ITEM_BYTES: dict[DType, int] = {"int64": 8, "int32": 4, "bool": 1, "float32": 4, "float16": 2, "bfloat16": 2}


def shape_of(tensor: TensorSpec, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Put numbers for the named dimensions of a tensor."""
    return tuple(dim if isinstance(dim, int) else sizes[dim] for dim in tensor.shape)


def bytes_of(tensor: TensorSpec, sizes: Mapping[str, int]) -> int:
    """Return the size of a tensor in bytes."""
    return math.prod(shape_of(tensor, sizes)) * ITEM_BYTES[tensor.dtype]


class Memory:
    """Device memory by tensor name. A buffer grows when it must, with its contents, and never shrinks.

    Whoever captured an address asks `reserve` whether it still holds.

    Attributes:
        num_bytes: device memory that is held.
    """

    def __init__(self, cuda: Cuda, stream: int) -> None:
        """Begin with nothing; `stream` is the only one that uses the buffers."""
        self.num_bytes = 0
        self._cuda, self._stream = cuda, stream
        self._addresses: dict[str, int] = {}
        self._sizes: dict[str, int] = {}

    def __getitem__(self, name: str) -> int:
        """Return the address of a buffer."""
        return self._addresses[name]

    def reserve(self, sizes: Mapping[str, int]) -> bool:
        """Make room.

        Args:
            sizes: bytes needed, by name.

        Returns:
            Whether a buffer that was there before has moved.

        Raises:
            BackendError: the device has no more memory; every buffer is as it was or as it was to be.
        """
        short = {name: size for name, size in sizes.items() if size > self._sizes.get(name, -1)}
        moved = [name for name in short if name in self._addresses]
        if moved:
            self._cuda.synchronize(self._stream)
        for name, size in short.items():
            self._grow(name, size)
        return bool(moved)

    def exchange(self, one: str, other: str) -> None:
        """Let two names change their buffers."""
        for table in (self._addresses, self._sizes):
            table[one], table[other] = table[other], table[one]

    def close(self) -> None:
        """Free everything; nothing may use it any more."""
        while self._addresses:
            name, address = self._addresses.popitem()
            self.num_bytes -= self._sizes.pop(name)
            self._cuda.free(address)

    def _grow(self, name: str, size: int) -> None:
        address = self._cuda.allocate(max(size, 1))
        if name in self._addresses:
            self._cuda.copy(address, self._addresses[name], self._sizes[name], self._stream)
            self._cuda.synchronize(self._stream)
            self._cuda.free(self._addresses[name])
        self.num_bytes += size - self._sizes.get(name, 0)
        self._addresses[name], self._sizes[name] = address, size


class Pinned:
    """Page-locked host arrays of one replica, freed together."""

    def __init__(self, cuda: Cuda) -> None:
        """Begin with nothing."""
        self._cuda = cuda
        self._arrays: list[Array] = []

    def array(self, size: int, dtype: DTypeLike) -> Array:
        """Return a flat array, which `close` frees."""
        made = self._cuda.pinned((max(size, 1),), dtype)
        self._arrays.append(made)
        return made

    def close(self) -> None:
        """Free every array; none may be read afterwards."""
        while self._arrays:
            self._cuda.unpin(self._arrays.pop())


class StepIO:
    """What the host gives a step and gets from it: pinned arrays, and the event behind the step.

    From the launch until `wait` returns, the arrays belong to the device.

    Attributes:
        target_ids: int64, flat [rows · target_len].
        cache_lengths: int64 [max rows].
        token_ids: int64, flat [rows · num_candidates].
        logits: float32, flat like token_ids.
        log_normalizer: float32 [max rows].
    """

    def __init__(self, cuda: Cuda, event: int, pinned: Pinned, limits: EngineLimits) -> None:
        """Make room for the largest step that the engines take."""
        rows = limits.max_batch
        self.target_ids: Ids = pinned.array(rows * limits.max_target_length, np.int64)
        self.cache_lengths: Ids = pinned.array(rows, np.int64)
        self.token_ids: Ids = pinned.array(rows * limits.max_candidates, np.int64)
        self.logits: Floats = pinned.array(rows * limits.max_candidates, np.float32)
        self.log_normalizer: Floats = pinned.array(rows, np.float32)
        self._cuda, self._event = cuda, event

    def record(self, stream: int) -> None:
        """Mark the end of the step that was just queued."""
        self._cuda.record(self._event, stream)

    def wait(self) -> None:
        """Wait for the newest step that used this io."""
        self._cuda.wait(self._event)

    def candidates(self, num_rows: int, num_candidates: int, rows: Ids, wanted: int) -> Candidates:
        """Copy out what a step has found.

        Args:
            num_rows: of the step.
            num_candidates: of the step.
            rows: those to copy, int64 [rows].
            wanted: how many candidates of each.
        """
        count = num_rows * num_candidates
        token_ids = self.token_ids[:count].reshape(num_rows, num_candidates)[rows, :wanted]
        logits = self.logits[:count].reshape(num_rows, num_candidates)[rows, :wanted]
        return Candidates(token_ids, logits, self.log_normalizer[rows])
