"""The decoder's self-attention cache in ONNX Runtime's memory, one class for each form of the graph."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from tfexport.config import Form
from tfexport.runtime.session import Ids
from tfexport.spec import FLOAT, ModelSpec, key_value_names

Array = NDArray[Any]

# A first buffer for this many tokens; it doubles when it is full, so that short texts do not pay for long ones.
FIRST_CAPACITY = 64


def ort_value(array: Array) -> ort.OrtValue:
    """Wrap an array; on the CPU the value shares its memory, and a binding alone does not keep it alive."""
    return ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array))


class OrtCache(Protocol):
    """What a step needs of its cache."""

    def reserve(self, length: int) -> bool:
        """Make room for `length` tokens; True when a step must be bound anew."""
        ...

    def bind(self, io: ort.IOBinding) -> None:
        """Bind past and present of every layer."""
        ...

    def advance(self, io: ort.IOBinding) -> bool:
        """Keep what a step has computed; True when the next must be bound anew."""
        ...

    def reorder(self, rows: Ids, past_len: int) -> bool:
        """Let row r be what row rows[r] was; True when a step must be bound anew."""
        ...


def make_cache(form: Form, spec: ModelSpec, rows: int) -> OrtCache:
    """Return an empty cache for `rows` rows."""
    return StaticCache(spec, rows) if form == "static" else ConcatCache(spec, rows)


def _zeros(spec: ModelSpec, rows: int, length: int) -> list[Array]:
    # Zeros, not whatever memory holds: a masked slot has weight 0, and 0 · NaN is NaN.
    widths = [spec.head_dim, spec.value_dim] * spec.layers
    return [np.zeros((rows, spec.heads, length, width), FLOAT[spec.precision]) for width in widths]


class ConcatCache:
    """Tensors that each step returns longer; the runtime owns them."""

    def __init__(self, spec: ModelSpec, rows: int) -> None:
        """Start with tensors of length 0."""
        self._past = key_value_names("past", spec.layers)
        self._present = key_value_names("present", spec.layers)
        self._values = [ort_value(array) for array in _zeros(spec, rows, 0)]

    def reserve(self, length: int) -> bool:
        """Need no room ahead."""
        return False

    def bind(self, io: ort.IOBinding) -> None:
        """Bind the tensors as past and let the runtime allocate the present."""
        for name, value in zip(self._past, self._values, strict=True):
            io.bind_ortvalue_input(name, value)
        for name in self._present:
            io.bind_output(name)

    def advance(self, io: ort.IOBinding) -> bool:
        """Make the present, the last outputs bound, the next step's past."""
        self._values = list(io.get_outputs())[-len(self._present) :]
        return True

    def reorder(self, rows: Ids, past_len: int) -> bool:
        """Copy the rows that go on."""
        self._values = [ort_value(value.numpy()[rows]) for value in self._values]
        return True


class StaticCache:
    """Buffers [rows, heads, capacity, …] that the graph writes in place; this object owns them.

    When rows leave, the first ones of the buffers stay in use; when rows come, new buffers are made.
    """

    def __init__(self, spec: ModelSpec, rows: int) -> None:
        """Start with zeroed buffers for a short text."""
        self._spec, self._rows = spec, rows
        self._past = key_value_names("past", spec.layers)
        self._present = key_value_names("present", spec.layers)
        self._buffers = _zeros(spec, rows, min(FIRST_CAPACITY, spec.max_target_length))

    def reserve(self, length: int) -> bool:
        """Double the buffers until `length` tokens fit."""
        capacity = self._buffers[0].shape[2]
        if length <= capacity:
            return False
        while capacity < length:
            capacity *= 2
        grown = _zeros(self._spec, self._rows, min(capacity, self._spec.max_target_length))
        for new, old in zip(grown, self._buffers, strict=True):
            new[:, :, : old.shape[2]] = old[: self._rows]
        self._buffers = grown
        return True

    def bind(self, io: ort.IOBinding) -> None:
        """Bind each buffer as input and as output: the new tokens are then written in place."""
        for past, present, buffer in zip(self._past, self._present, self._buffers, strict=True):
            value = ort_value(buffer[: self._rows])
            io.bind_ortvalue_input(past, value)
            io.bind_ortvalue_output(present, value)

    def advance(self, io: ort.IOBinding) -> bool:
        """Have nothing to do: the step has written in place."""
        return False

    def reorder(self, rows: Ids, past_len: int) -> bool:
        """Overwrite the rows that change, up to `past_len`."""
        rebind = rows.size != self._rows
        self._rows = rows.size
        if rows.size > self._buffers[0].shape[0]:
            grown = _zeros(self._spec, rows.size, self._buffers[0].shape[2])
            for new, old in zip(grown, self._buffers, strict=True):
                new[:, :, :past_len] = old[rows, :, :past_len]
            self._buffers = grown
            return True
        moved = np.flatnonzero(rows != np.arange(rows.size))
        for buffer in self._buffers:
            buffer[moved, :, :past_len] = buffer[rows[moved], :, :past_len]
        return rebind
