"""Where the sources of a batch lie on the device, and their caches: copied there, never on the host."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from tfexport.runtime.session import Ids
from tfexport.runtime.trt.engine import Context
from tfexport.runtime.trt.graphs import CudaGraphRunner, LruCache
from tfexport.runtime.trt.resources import ITEM_BYTES, DeviceResources, bytes_of, shape_of
from tfexport.spec import CACHE, FLOAT, ORDER, REORDER, REORDERED, Form, decoder_graph, key_value_names

SCRATCH = "scratch"
# Batch sizes whose graphs are kept: beam search has one, and one more for each time that the batch changes its own.
MAX_GRAPHS = 16
# Slot that a source leaves, slot that it takes.
SlotCopy = tuple[int, int]


def bucket(number: int, most: int) -> int:
    """Return the power of two from `number` up, or `most` where that is less."""
    return min(1 << (number - 1).bit_length(), most)


@dataclass(frozen=True)
class BatchLayout:
    """The sources of a batch in the slots of the device.

    The device decodes all slots, whether a source is in them or not, so that its shapes stay. A source that leaves
    changes this map alone: its slot runs on and nobody reads it.

    Attributes:
        size: slots, the padded batch size.
        width: rows of each slot.
        source_len: tokens of a slot's source, padding included.
        slots: slot of each source, int64 [sources].
    """

    size: int
    width: int
    source_len: int
    slots: Ids

    @property
    def num_rows(self) -> int:
        """Rows on the device."""
        return self.size * self.width

    @cached_property
    def rows(self) -> Ids:
        """Device row of each row of the batch, int64 [rows]."""
        rows: Ids = (self.slots[:, None] * self.width + np.arange(self.width)).ravel()
        return rows

    def fit(self, first: int, size: int) -> tuple[BatchLayout, list[SlotCopy]]:
        """Bring all sources into the slots first … size - 1, of which there are enough.

        Returns:
            The layout afterwards and the copies that it takes, in any order: each goes into a slot that is free.
        """
        outside = (self.slots < first) | (self.slots >= size)
        free = np.setdiff1d(np.arange(first, size), self.slots)[: np.count_nonzero(outside)]
        copies = list(zip(self.slots[outside].tolist(), free.tolist(), strict=True))
        slots = self.slots.copy()
        slots[outside] = free
        return replace(self, size=size, slots=slots), copies


class Caches:
    """Keys and values of source and target, row by row.

    Rows are the leading axis of every tensor, so that a slot is one piece of memory. Static form: each row has the
    memory of max_target_length tokens. Concat form: that of past_len, and a step writes longer rows into `present_*`.
    """

    def __init__(self, device: DeviceResources, form: Form) -> None:
        """Begin without memory."""
        self._device, self._form = device, form
        spec = device.engines.spec
        graph = decoder_graph(spec, form)
        self._tensors = {tensor.name: tensor for tensor in (*graph.inputs, *graph.outputs)}
        self._past, self._cross = key_value_names("past", spec.layers), key_value_names("cross", spec.layers)
        self._present = key_value_names("present", spec.layers)
        self._item_bytes = ITEM_BYTES[FLOAT[spec.precision]]
        self._reorder = CacheReorder(device)

    def sizes(self, size: int, width: int, source_len: int) -> dict[str, int]:
        """Return the bytes that the buffers must have for so many slots and source tokens."""
        capacity = self._device.engines.limits.max_target_length
        lengths = dict.fromkeys(("capacity", "past_len", "past_len + target_len"), capacity)
        dims = {"batch": size, "rows": size * width, "source_len": source_len, **lengths}
        names = [*self._cross, *self._past, *(self._present if self._form == "concat" else ())]
        sizes = {name: bytes_of(self._tensors[name], dims) for name in names}
        return {**sizes, SCRATCH: max(sizes.values())}

    def copy_slots(self, layout: BatchLayout, copies: Sequence[SlotCopy], past_len: int) -> None:
        """Queue copies of whole slots, source and rows, into free ones; `layout` holds before and after."""
        for names, rows in ((self._cross, 1), (self._past, layout.width)):
            for name, numbers in self._row_sizes(names, layout.source_len, past_len).items():
                num_bytes, address = rows * numbers * self._item_bytes, self._device.memory[name]
                for source, target in copies:
                    start = address + target * num_bytes
                    self._device.cuda.copy(start, address + source * num_bytes, num_bytes, self._device.stream)

    def pad_sources(self, layout: BatchLayout, before: int) -> None:
        """Queue the source length of `layout` for all its slots, which was `before`.

        What is new is zero: a masked place has weight 0, and 0 · NaN is NaN.
        """
        device, rows = self._device, layout.size * self._device.engines.spec.heads
        old, new = (self._row_sizes(self._cross, length, 0) for length in (before, layout.source_len))
        for name in self._cross:
            address, scratch = device.memory[name], device.memory[SCRATCH]
            was, now = (layout.size * numbers[name] * self._item_bytes for numbers in (old, new))
            device.cuda.copy(scratch, address, was, device.stream)
            device.cuda.clear(address, now, device.stream)
            device.cuda.copy_2d(address, now // rows, scratch, was // rows, rows, device.stream)

    def clear_rows(self, num_rows: int) -> None:
        """Queue zeros for the first rows of the target's caches, where a NaN of their last user would count."""
        for name, numbers in self._row_sizes(self._past, 0, 0).items():
            num_bytes = num_rows * numbers * self._item_bytes
            self._device.cuda.clear(self._device.memory[name], num_bytes, self._device.stream)

    def reorder(self, order: Ids, past_len: int) -> None:
        """Queue: row r becomes what row order[r] was, int64 [rows on the device]."""
        widths = self._row_sizes(self._past, 0, past_len)
        self._reorder.run(widths, order, replays=self._form == "static")

    def exchange(self) -> None:
        """Let what a step of the concat form has written be the past of the next."""
        for past, present in zip(self._past, self._present, strict=True):
            self._device.memory.exchange(past, present)

    def forget(self) -> None:
        """Free the graphs, because buffers were reallocated or the replica closes."""
        self._reorder.forget()

    def _row_sizes(self, names: Sequence[str], source_len: int, past_len: int) -> dict[str, int]:
        """Return how many numbers a row of each tensor has."""
        capacity = self._device.engines.limits.max_target_length
        dims = {"batch": 1, "rows": 1, "source_len": source_len, "capacity": capacity, "past_len": past_len}
        return {name: math.prod(shape_of(self._tensors[name], dims)) for name in names}


@dataclass(frozen=True)
class _Recorded:
    """A reorder that comes again: a context bound to each width, and the graph."""

    contexts: Mapping[int, Context]
    runner: CudaGraphRunner

    def close(self) -> None:
        self.runner.close()


class CacheReorder:
    """Gathers rows by the engine `reorder`, each tensor through `scratch` and back to its place.

    So every address stays, and one scratch buffer serves all tensors.
    """

    def __init__(self, device: DeviceResources) -> None:
        """Prepare for as many rows as the engines take."""
        self._device = device
        self._item_bytes = ITEM_BYTES[FLOAT[device.engines.spec.precision]]
        self._order: Ids = device.pinned.array(device.engines.limits.max_batch, np.int64)
        self._order_was_read = device.event()
        device.memory.reserve({ORDER: self._order.nbytes})
        self._context = device.context(REORDER)
        self._recorded: LruCache[_Recorded] = LruCache(MAX_GRAPHS, device.synchronize)

    def run(self, widths: Mapping[str, int], order: Ids, *, replays: bool) -> None:
        """Queue: row r of each tensor becomes what row order[r] was.

        Args:
            widths: numbers in a row of each tensor, by name.
            order: int64 [rows].
            replays: whether widths are the same at every call, so that a CUDA graph of it pays.

        Raises:
            BackendError: the engine refuses.
        """
        names: dict[int, list[str]] = defaultdict(list)
        for name, width in widths.items():
            names[width].append(name)
        self._device.cuda.wait(self._order_was_read)
        self._order[: order.size] = order
        if replays:
            self._replay(names, order.size)
        else:
            self._upload(order.size)
            for width, group in names.items():
                self._bind(self._context, width, order.size)
                self._gather(self._context, group, width, order.size)
        self._device.cuda.record(self._order_was_read, self._device.stream)

    def forget(self) -> None:
        """Free the graphs."""
        self._recorded.clear()

    def _replay(self, names: Mapping[int, Sequence[str]], num_rows: int) -> None:
        device = self._device

        def record() -> _Recorded:
            contexts = {width: device.context(REORDER, use="be captured") for width in names}
            for width, context in contexts.items():
                self._bind(context, width, num_rows)
            return _Recorded(contexts, CudaGraphRunner(device.cuda, device.stream, device.engines.capture))

        recorded = self._recorded.get(num_rows, record)

        def queue() -> None:
            self._upload(num_rows)
            for width, group in names.items():
                self._gather(recorded.contexts[width], group, width, num_rows)

        def can_capture() -> bool:
            return all(context.can_be_captured(self._device.stream) for context in recorded.contexts.values())

        recorded.runner.run(REORDER, queue, can_capture)

    def _upload(self, num_rows: int) -> None:
        self._device.cuda.upload(self._device.memory[ORDER], self._order[:num_rows], self._device.stream)

    def _bind(self, context: Context, width: int, num_rows: int) -> None:
        shapes = {CACHE: (num_rows, width), ORDER: (num_rows,)}
        context.bind(shapes, {ORDER: self._device.memory[ORDER], REORDERED: self._device.memory[SCRATCH]})

    def _gather(self, context: Context, names: Sequence[str], width: int, num_rows: int) -> None:
        memory, stream = self._device.memory, self._device.stream
        for name in names:
            context.place({CACHE: memory[name]})
            context.run(stream)
            self._device.cuda.copy(memory[name], memory[SCRATCH], num_rows * width * self._item_bytes, stream)
