"""The decoder's self-attention cache in ONNX Runtime's memory, one class for each form of the graph."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from tfexport.runtime.ort.device import OrtDevice, host_value
from tfexport.runtime.session import Ids
from tfexport.spec import FLOAT, Form, ModelSpec, key_value_names

Array = NDArray[Any]

# A first buffer for this many tokens; it doubles when it is full, so that short texts do not pay for long ones:
# attention is computed over the whole buffer, on a GPU too.
FIRST_CAPACITY = 64


class OrtCache(Protocol):
    """What a step needs of its cache."""

    def reserve(self, length: int) -> bool:
        """Make room for `length` tokens; True when a step must be bound anew."""
        ...

    def bind(self, binding: ort.IOBinding) -> None:
        """Bind past and present of every layer."""
        ...

    def advance(self, binding: ort.IOBinding) -> bool:
        """Keep what a step has computed; True when the next must be bound anew."""
        ...

    def reorder(self, rows: Ids, past_len: int) -> bool:
        """Let row r be what row rows[r] was; True when a step must be bound anew."""
        ...


def make_cache(form: Form, spec: ModelSpec, device: OrtDevice, rows: int, *, on_host: bool) -> OrtCache:
    """Return an empty cache for `rows` rows; `on_host` where numpy may keep buffers that are written in place."""
    if form == "concat":
        return ConcatCache(spec, device, rows)
    return HostStaticCache(spec, rows) if on_host else DeviceStaticCache(spec, device, rows)


def _widths(spec: ModelSpec) -> list[int]:
    return [spec.head_dim, spec.value_dim] * spec.layers


def _no_tokens(spec: ModelSpec, device: OrtDevice, rows: int) -> list[ort.OrtValue]:
    return [device.empty((rows, spec.heads, 0, width), FLOAT[spec.precision]) for width in _widths(spec)]


class ConcatCache:
    """Tensors on the device that each step returns longer; the runtime owns them."""

    def __init__(self, spec: ModelSpec, device: OrtDevice, rows: int) -> None:
        """Start with tensors of length 0."""
        self._device = device
        self._past = key_value_names("past", spec.layers)
        self._present = key_value_names("present", spec.layers)
        self._values = _no_tokens(spec, device, rows)

    def reserve(self, length: int) -> bool:
        """Need no room ahead."""
        return False

    def bind(self, binding: ort.IOBinding) -> None:
        """Bind the tensors as past and let the runtime reserve the present."""
        for name, value in zip(self._past, self._values, strict=True):
            binding.bind_ortvalue_input(name, value)
        for name in self._present:
            self._device.bind_output(binding, name)

    def advance(self, binding: ort.IOBinding) -> bool:
        """Make the present, the last outputs bound, the next step's past."""
        self._values = list(binding.get_outputs())[-len(self._present) :]
        return True

    def reorder(self, rows: Ids, past_len: int) -> bool:
        """Copy the rows that go on."""
        self._values = self._device.take(self._values, rows)
        return True


class DeviceStaticCache:
    """Buffers [rows, heads, capacity, …] on the device that the graph writes in place; this object owns them."""

    def __init__(self, spec: ModelSpec, device: OrtDevice, rows: int) -> None:
        """Start with zeroed buffers for a short text."""
        self._device, self._limit = device, spec.max_target_length
        self._past = key_value_names("past", spec.layers)
        self._present = key_value_names("present", spec.layers)
        self._capacity = min(FIRST_CAPACITY, self._limit)
        # Zeros, not whatever memory holds: a masked slot has weight 0, and 0 · NaN is NaN.
        self._buffers = device.extend(_no_tokens(spec, device, rows), self._capacity)

    def reserve(self, length: int) -> bool:
        """Double the buffers until `length` tokens fit."""
        if length <= self._capacity:
            return False
        while self._capacity < length:
            self._capacity = min(2 * self._capacity, self._limit)
        self._buffers = self._device.extend(self._buffers, self._capacity)
        return True

    def bind(self, binding: ort.IOBinding) -> None:
        """Bind each buffer as input and as output: the new tokens are then written in place."""
        for past, present, buffer in zip(self._past, self._present, self._buffers, strict=True):
            binding.bind_ortvalue_input(past, buffer)
            binding.bind_ortvalue_output(present, buffer)

    def advance(self, binding: ort.IOBinding) -> bool:
        """Have nothing to do: the step has written in place."""
        return False

    def reorder(self, rows: Ids, past_len: int) -> bool:
        """Copy the rows that go on into new buffers."""
        self._buffers = self._device.take(self._buffers, rows)
        return True


class HostStaticCache:
    """Buffers [rows, heads, capacity, …] of numpy that the graph writes in place; this object owns them.

    Only the rows that change are copied, up to the tokens they hold. When rows leave, the first ones
    of the buffers stay in use; when rows come, new buffers are made.
    """

    def __init__(self, spec: ModelSpec, rows: int) -> None:
        """Start with zeroed buffers for a short text."""
        self._spec, self._rows = spec, rows
        self._past = key_value_names("past", spec.layers)
        self._present = key_value_names("present", spec.layers)
        self._buffers = self._zeros(rows, min(FIRST_CAPACITY, spec.max_target_length))

    def reserve(self, length: int) -> bool:
        """Double the buffers until `length` tokens fit."""
        capacity = self._buffers[0].shape[2]
        if length <= capacity:
            return False
        while capacity < length:
            capacity *= 2
        grown = self._zeros(self._rows, min(capacity, self._spec.max_target_length))
        for new, old in zip(grown, self._buffers, strict=True):
            new[:, :, : old.shape[2]] = old[: self._rows]
        self._buffers = grown
        return True

    def bind(self, binding: ort.IOBinding) -> None:
        """Bind each buffer as input and as output: the new tokens are then written in place."""
        for past, present, buffer in zip(self._past, self._present, self._buffers, strict=True):
            value = host_value(buffer[: self._rows])
            binding.bind_ortvalue_input(past, value)
            binding.bind_ortvalue_output(present, value)

    def advance(self, binding: ort.IOBinding) -> bool:
        """Have nothing to do: the step has written in place."""
        return False

    def reorder(self, rows: Ids, past_len: int) -> bool:
        """Overwrite the rows that change, up to `past_len`."""
        rebind = rows.size != self._rows
        self._rows = rows.size
        if rows.size > self._buffers[0].shape[0]:
            grown = self._zeros(rows.size, self._buffers[0].shape[2])
            for new, old in zip(grown, self._buffers, strict=True):
                new[:, :, :past_len] = old[rows, :, :past_len]
            self._buffers = grown
            return True
        moved = np.flatnonzero(rows != np.arange(rows.size))
        for buffer in self._buffers:
            buffer[moved, :, :past_len] = buffer[rows[moved], :, :past_len]
        return rebind

    def _zeros(self, rows: int, length: int) -> list[Array]:
        # Zeros, not whatever memory holds: a masked slot has weight 0, and 0 · NaN is NaN.
        dtype = FLOAT[self._spec.precision]
        return [np.zeros((rows, self._spec.heads, length, width), dtype) for width in _widths(self._spec)]
