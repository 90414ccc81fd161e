"""Store the keys and values of all layers, on the host or on the device.

Places that were never written are 0, and a row is overwritten before its next user reads it: a masked place has weight
0, but 0 · NaN is NaN.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from tfexport.contract import CacheKind
from tfexport.precision import ITEM_BYTES
from tfexport.runtime.ort._device import ELEMENT_TYPE, RowGather
from tfexport.runtime.session import Ids

# Initial capacity in tokens. It doubles when full, because attention is computed over the whole buffer, even on a GPU.
FIRST_CAPACITY = 64


class RowBuffers(ABC):
    """Keys and values of every layer, each [rows, heads, length, …], or states."""

    rows: int  # capacity
    length: int  # capacity of each row in tokens; 1 for states

    @abstractmethod
    def resize(self, rows: int, length: int, live: int) -> None:
        """Reallocate: copy the first `live` rows as far as they fit, zero the rest."""

    @abstractmethod
    def write(self, to: Ids, other: Self, of: Ids) -> None:
        """Copy rows `of` of `other`, at most as long, to rows `to`; zero their rest."""

    @abstractmethod
    def clear(self, rows: Ids) -> None:
        """Fill rows with zeros."""

    @abstractmethod
    def reorder(self, rows: Ids, length: int) -> bool:
        """Copy row rows[r] to row r, up to `length`; return whether the memory changed."""

    def bind(self, bind: Callable[..., None], names: Sequence[str], rows: int, first: int = 0) -> None:
        """Bind rows from `first` on with `bind_input` or `bind_output` of an `IOBinding`."""
        for name, place in zip(names, self._places(rows, first), strict=True):
            bind(name, *place)

    @abstractmethod
    def _places(self, rows: int, first: int) -> Iterator[tuple[Any, ...]]:
        """Yield the arguments of `bind_input` and `bind_output` for each key and value."""


def row_buffers(kind: CacheKind, gather: RowGather | None, rows: int, length: int) -> RowBuffers:
    """Return zeroed buffers on the device of `gather`, or on the host without it."""
    length = length if kind.grows else 1
    return _HostBuffers(kind, rows, length) if gather is None else _DeviceBuffers(gather, kind, rows, length)


class _HostBuffers(RowBuffers):
    """Arrays that NumPy shares with ONNX Runtime; only changed rows are copied."""

    def __init__(self, kind: CacheKind, rows: int, length: int) -> None:
        self.rows, self.length, self._kind = rows, length, kind
        self._arrays = self._zeros()

    def _zeros(self) -> list[NDArray[Any]]:
        kind, widths = self._kind, [*self._kind.widths.values()] * self._kind.layers
        return [np.zeros((self.rows, kind.heads, self.length, width), kind.dtype) for width in widths]

    def resize(self, rows: int, length: int, live: int) -> None:
        copied = np.s_[:live, :, : min(length, self.length)]
        self.rows, self.length, old = rows, length, self._arrays
        self._arrays = self._zeros()
        for array, before in zip(self._arrays, old, strict=True):
            array[copied] = before[copied]

    def write(self, to: Ids, other: _HostBuffers, of: Ids) -> None:
        for array, theirs in zip(self._arrays, other._arrays, strict=True):
            array[to, :, : other.length] = theirs[of]
            array[to, :, other.length :] = 0

    def clear(self, rows: Ids) -> None:
        for array in self._arrays:
            array[rows] = 0

    def reorder(self, rows: Ids, length: int) -> bool:
        moved = np.flatnonzero(rows != np.arange(rows.size))
        for array in self._arrays:
            array[moved, :, :length] = array[rows[moved], :, :length]
        return False

    def _places(self, rows: int, first: int) -> Iterator[tuple[Any, ...]]:
        for array, shape in zip(self._arrays, self._kind.shapes(rows, self.length), strict=True):
            yield "cpu", 0, array.dtype.type, shape, array[first:].ctypes.data


class _DeviceBuffers(RowBuffers):
    """One block of device memory, with all keys and values one after the other.

    Every move copies units. A unit is some tokens of one row and head, with a number of items that divides both keys
    and values. A unit of zeros follows the last value.
    """

    def __init__(self, gather: RowGather, kind: CacheKind, rows: int, length: int) -> None:
        self.rows, self.length, self._kind, self._gather = 0, length, kind, gather
        self._item = ITEM_BYTES[gather.dtype]
        # In items of the graph, which moves bytes of any type.
        item = ITEM_BYTES[kind.dtype] // self._item
        self._widths = [item * width for width in kind.widths.values()] * kind.layers
        self._divisor = math.gcd(*self._widths)
        zeros = np.zeros(length * self._divisor * self._item, np.uint8)
        self._memory = ort.OrtValue.ortvalue_from_numpy(zeros, *gather.device.place)
        if rows:
            self.resize(rows, length, 0)

    def resize(self, rows: int, length: int, live: int) -> None:
        places = math.gcd(self.length, length)
        units, zero = self._units(places)
        orders = []
        for old, shape in zip(units, self._shapes(rows, length, places), strict=True):
            order = np.full(shape, zero)
            copied = np.s_[:live, :, : min(old.shape[2], shape[2])]
            order[copied] = old[copied]
            orders.append(order)
        self._move(orders, zero, rows, length, places)

    def write(self, to: Ids, other: _DeviceBuffers, of: Ids) -> None:
        places = math.gcd(self.length, other.length)
        units, zero = other._units(places)
        # One copy for neighboring rows of each key or value.
        stretches = np.split(np.arange(to.size), np.flatnonzero(np.diff(to) != 1) + 1)
        for index, (theirs, shape) in enumerate(zip(units, self._shapes(to.size, self.length, places), strict=True)):
            order = np.full(shape, zero)
            order[:, :, : theirs.shape[2]] = theirs[of]
            for stretch in stretches:
                address = self._address(index, int(to[stretch[0]]))
                self._gather.copy(other._memory, places * self._divisor, order[stretch], address)

    def clear(self, rows: Ids) -> None:
        self.write(rows, _DeviceBuffers(self._gather, self._kind, 1, self.length), np.zeros_like(rows))

    def reorder(self, rows: Ids, length: int) -> bool:
        units, zero = self._units(self.length)
        self._move([unit[rows] for unit in units], zero, rows.size, self.length, self.length)
        return True

    def _places(self, rows: int, first: int) -> Iterator[tuple[Any, ...]]:
        for index, shape in enumerate(self._kind.shapes(rows, self.length)):
            yield *self._gather.device.place, ELEMENT_TYPE[self._kind.dtype], shape, self._address(index, first)

    def _address(self, index: int, row: int) -> int:
        before, width = sum(self._widths[:index]), self._widths[index]
        items = (self.rows * before + row * width) * self._kind.heads * self.length
        address: int = self._memory.data_ptr() + items * self._item
        return address

    def _shapes(self, rows: int, length: int, places: int) -> list[tuple[int, int, int]]:
        heads, divisor = self._kind.heads, self._divisor
        return [(rows, heads, length // places * (width // divisor)) for width in self._widths]

    def _units(self, places: int) -> tuple[list[Ids], int]:
        """Return the unit numbers of each key and value, and that of the unit of zeros."""
        shapes = self._shapes(self.rows, self.length, places)
        ends = np.cumsum([math.prod(shape) for shape in shapes])
        units = np.split(np.arange(ends[-1]), ends[:-1])
        return [each.reshape(shape) for each, shape in zip(units, shapes, strict=True)], int(ends[-1])

    def _move(self, orders: list[Ids], zero: int, rows: int, length: int, places: int) -> None:
        order = np.concatenate([*(order.ravel() for order in orders), np.full(length // places, zero)])
        width = places * self._divisor
        size = order.size * width * self._item
        memory = ort.OrtValue.ortvalue_from_shape_and_type([size], np.uint8, *self._gather.device.place)
        self._gather.copy(self._memory, width, order, memory.data_ptr())
        self._memory, self.rows, self.length = memory, rows, length
