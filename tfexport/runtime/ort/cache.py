"""Keys and values of all layers in buffers that steps are bound to: numpy's on the host, or the device's.

A row keeps its place while others come and go. Places that nobody has written are 0, and what one user of a row left
is overwritten before the next reads it: a masked place has weight 0, but 0 · NaN is NaN.
"""

from __future__ import annotations

import math
from typing import Any, Protocol, Self

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from tfexport.contract import FLOAT, ModelSpec, key_value_names
from tfexport.runtime.ort.device import ELEMENT_TYPE
from tfexport.runtime.ort.gather import ITEM_BYTES, RowGather
from tfexport.runtime.session import Ids

# A first buffer for this many tokens; it doubles when it is full, so that short texts do not pay for long ones:
# attention is computed over the whole buffer, on a GPU too.
FIRST_CAPACITY = 64


class RowBuffers(Protocol):
    """Keys and values of every layer, [rows, heads, length, …] each.

    Attributes:
        rows: there is room for.
        length: places of a row.
    """

    rows: int
    length: int

    def resize(self, rows: int, length: int, live: int) -> None:
        """Move to other memory, with the first `live` rows as far as they fit, and zeros elsewhere."""
        ...

    def write(self, to: Ids, other: Self, of: Ids) -> None:
        """Let rows `to` be what rows `of` of buffers that are no longer are, and zeros behind.

        `other` may be the same buffers where no row is in both `to` and `of`.
        """
        ...

    def clear(self, rows: Ids) -> None:
        """Let rows be zeros."""
        ...

    def reorder(self, rows: Ids, length: int) -> bool:
        """Let row r be what row rows[r] was, up to `length` places; True when they lie in other memory now."""
        ...

    def bind_input(self, io: ort.IOBinding, prefix: str, rows: int, first: int = 0) -> None:
        """Bind rows from `first` on as inputs prefix_key.0, prefix_value.0 and so on."""
        ...

    def bind_output(self, io: ort.IOBinding, prefix: str, rows: int, first: int = 0) -> None:
        """Bind rows from `first` on as outputs; inputs that are also outputs are written in place."""
        ...


class HostBuffers:
    """Arrays that numpy shares with ONNX Runtime on the CPU; only what changes is copied."""

    def __init__(self, spec: ModelSpec, rows: int, length: int) -> None:
        """Start with zeros."""
        self.rows, self.length, self._spec = rows, length, spec
        self._arrays = self._zeros()

    def _zeros(self) -> list[NDArray[Any]]:
        heads, dtype = self._spec.cache_heads, FLOAT[self._spec.precision]
        return [np.zeros((self.rows, heads, self.length, width), dtype) for width in _widths(self._spec)]

    def resize(self, rows: int, length: int, live: int) -> None:
        """Copy what stays into new arrays; see `RowBuffers.resize`."""
        kept = np.s_[:live, :, : min(length, self.length)]
        self.rows, self.length, old = rows, length, self._arrays
        self._arrays = self._zeros()
        for array, before in zip(self._arrays, old, strict=True):
            array[kept] = before[kept]

    def write(self, to: Ids, other: HostBuffers, of: Ids) -> None:
        """Copy rows of other buffers; see `RowBuffers.write`."""
        for array, theirs in zip(self._arrays, other._arrays, strict=True):
            array[to, :, : other.length] = theirs[of]
            array[to, :, other.length :] = 0

    def clear(self, rows: Ids) -> None:
        """Write zeros."""
        for array in self._arrays:
            array[rows] = 0

    def reorder(self, rows: Ids, length: int) -> bool:
        """Overwrite the rows that change, in place; see `RowBuffers.reorder`."""
        moved = np.flatnonzero(rows != np.arange(rows.size))
        for array in self._arrays:
            array[moved, :, :length] = array[rows[moved], :, :length]
        return False

    def bind_input(self, io: ort.IOBinding, prefix: str, rows: int, first: int = 0) -> None:
        """Bind the memory of the arrays; see `RowBuffers.bind_input`."""
        for name, array in zip(key_value_names(prefix, self._spec.layers), self._arrays, strict=True):
            io.bind_input(name, "cpu", 0, array.dtype.type, (rows, *array.shape[1:]), array[first:].ctypes.data)

    def bind_output(self, io: ort.IOBinding, prefix: str, rows: int, first: int = 0) -> None:
        """Bind the memory of the arrays; see `RowBuffers.bind_output`."""
        for name, array in zip(key_value_names(prefix, self._spec.layers), self._arrays, strict=True):
            io.bind_output(name, "cpu", 0, array.dtype.type, (rows, *array.shape[1:]), array[first:].ctypes.data)


class DeviceBuffers:
    """One piece of the device's memory, [rows, heads, length, …] of one key or value behind the other.

    All moves are copies of units: some places of one row and head, in as many items as divide keys and values alike.
    Behind the last value lies a unit of zeros to copy from.
    """

    def __init__(self, spec: ModelSpec, gather: RowGather, rows: int, length: int) -> None:
        """Start with zeros."""
        self.rows, self.length, self._spec, self._gather = 0, length, spec, gather
        self._item = ITEM_BYTES[gather.dtype]
        self._divisor = math.gcd(spec.head_dim, spec.value_dim)
        self._memory = gather.device.zeros(length * self._divisor * self._item)
        if rows:
            self.resize(rows, length, 0)

    def resize(self, rows: int, length: int, live: int) -> None:
        """Copy what stays into other memory, in one run; see `RowBuffers.resize`."""
        places = math.gcd(self.length, length)
        units, zero = self._units(places)
        orders = []
        for old, shape in zip(units, self._shapes(rows, length, places), strict=True):
            order = np.full(shape, zero)
            kept = np.s_[:live, :, : min(old.shape[2], shape[2])]
            order[kept] = old[kept]
            orders.append(order)
        self._move(orders, zero, rows, length, places)

    def write(self, to: Ids, other: DeviceBuffers, of: Ids) -> None:
        """Copy rows of other buffers, a run for neighbours in each key or value; see `RowBuffers.write`."""
        places = math.gcd(self.length, other.length)
        units, zero = other._units(places)
        stretches = np.split(np.arange(to.size), np.flatnonzero(np.diff(to) != 1) + 1)
        for index, (theirs, shape) in enumerate(zip(units, self._shapes(to.size, self.length, places), strict=True)):
            order = np.full(shape, zero)
            order[:, :, : theirs.shape[2]] = theirs[of]
            for stretch in stretches:
                address = self._address(index, int(to[stretch[0]]))
                self._gather.copy(other._memory, places * self._divisor, order[stretch], address)

    def clear(self, rows: Ids) -> None:
        """Copy zeros."""
        self.write(rows, DeviceBuffers(self._spec, self._gather, 1, self.length), np.zeros_like(rows))

    def reorder(self, rows: Ids, length: int) -> bool:
        """Copy the rows that go on into memory for just so many, in one run; see `RowBuffers.reorder`."""
        units, zero = self._units(self.length)
        self._move([unit[rows] for unit in units], zero, rows.size, self.length, self.length)
        return True

    def bind_input(self, io: ort.IOBinding, prefix: str, rows: int, first: int = 0) -> None:
        """Bind the memory; see `RowBuffers.bind_input`."""
        for index, (name, width) in enumerate(self._tensors(prefix)):
            io.bind_input(*self._place(name, width, rows), self._address(index, first))

    def bind_output(self, io: ort.IOBinding, prefix: str, rows: int, first: int = 0) -> None:
        """Bind the memory; see `RowBuffers.bind_output`."""
        for index, (name, width) in enumerate(self._tensors(prefix)):
            io.bind_output(*self._place(name, width, rows), self._address(index, first))

    def _tensors(self, prefix: str) -> list[tuple[str, int]]:
        return list(zip(key_value_names(prefix, self._spec.layers), _widths(self._spec), strict=True))

    def _place(self, name: str, width: int, rows: int) -> tuple[str, str, int, int, list[int]]:
        shape = [rows, self._spec.cache_heads, self.length, width]
        return name, self._gather.device.type, 0, ELEMENT_TYPE[self._gather.dtype], shape

    def _address(self, index: int, row: int) -> int:
        """Return where a row of one key or value begins."""
        widths = _widths(self._spec)
        items = (self.rows * sum(widths[:index]) + row * widths[index]) * self._spec.cache_heads * self.length
        address: int = self._memory.data_ptr() + items * self._item
        return address

    def _shapes(self, rows: int, length: int, places: int) -> list[tuple[int, int, int]]:
        """Count the units of each key and value: [rows, heads, units]."""
        heads = self._spec.cache_heads
        return [(rows, heads, length // places * (width // self._divisor)) for width in _widths(self._spec)]

    def _units(self, places: int) -> tuple[list[Ids], int]:
        """Number the units of so many places, those of each key and value, and the one of zeros."""
        shapes = self._shapes(self.rows, self.length, places)
        ends = np.cumsum([math.prod(shape) for shape in shapes])
        units = np.split(np.arange(ends[-1]), ends[:-1])
        return [each.reshape(shape) for each, shape in zip(units, shapes, strict=True)], int(ends[-1])

    def _move(self, orders: list[Ids], zero: int, rows: int, length: int, places: int) -> None:
        """Copy units, and the zeros behind them, into other memory."""
        order = np.concatenate([*(order.ravel() for order in orders), np.full(length // places, zero)])
        width = places * self._divisor
        memory = self._gather.device.reserve(order.size * width * self._item)
        self._gather.copy(self._memory, width, order, memory.data_ptr())
        self._memory, self.rows, self.length = memory, rows, length


def _widths(spec: ModelSpec) -> list[int]:
    return [spec.head_dim, spec.value_dim] * spec.layers
