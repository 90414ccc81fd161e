"""Assign sources to slots on the device, and copy their KV caches there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np

from tfexport.contract import CACHE, ORDER, REORDER, REORDERED, Variant, decoder_graph
from tfexport.precision import FLOAT, ITEM_BYTES
from tfexport.runtime.session import Ids
from tfexport.tensorrt.config import Shape
from tfexport.tensorrt.session._engine import MAX_GRAPHS, Context, CudaGraphRunner, LruCache
from tfexport.tensorrt.session._resources import DeviceResources, bytes_of

SCRATCH = "scratch"
SlotCopy = tuple[int, int]  # source slot, target slot
Pair = tuple[str, str]  # cache that is read, cache that is written


def bucket(number: int, most: int) -> int:
    """Round up to a power of two, but at most to `most`."""
    return min(1 << (number - 1).bit_length(), most)


@dataclass(frozen=True)
class BatchLayout:
    """Assigns the sources of a batch to slots; all slots are decoded, used or not."""

    size: int  # number of slots, the padded batch size
    width: int  # rows of each slot
    source_len: int  # tokens of a slot's source, padding included
    capacity: int  # tokens that fit into the cache of a row
    slots: Ids  # slot of each source, int64 [sources]

    @property
    def num_rows(self) -> int:
        return self.size * self.width

    @cached_property
    def rows(self) -> Ids:
        """Row on the device of each row of the batch, int64 [rows]."""
        rows: Ids = (self.slots[:, None] * self.width + np.arange(self.width)).ravel()
        return rows

    def fit(self, first: int, size: int) -> tuple[BatchLayout, list[SlotCopy]]:
        """Move all sources into slots first … size - 1, each copy into a free slot."""
        outside = (self.slots < first) | (self.slots >= size)
        free = np.setdiff1d(np.arange(first, size), self.slots)[: np.count_nonzero(outside)]
        copies = list(zip(self.slots[outside].tolist(), free.tolist(), strict=True))
        slots = self.slots.copy()
        slots[outside] = free
        return replace(self, size=size, slots=slots), copies


class Caches:
    """KV caches of source and target.

    Rows are the leading axis of every tensor, so a slot is contiguous. Each target cache has a twin: a reorder or a
    concat step reads `past_*` and writes `present_*`, then the two swap names. Static variant: each row has memory for
    `capacity` tokens and is written in place; the first reorder allocates the twins. Concat variant: each row has
    memory for past_len tokens, and each step writes the twins. States: each step writes the twins, so it can be
    repeated.
    """

    def __init__(self, device: DeviceResources, variant: Variant) -> None:
        self.side = 0  # changes with every swap; a CUDA graph is valid only for the side that it was captured on
        self._device, self._variant = device, variant
        spec = device.engines.spec
        graph = decoder_graph(spec, variant)
        self._tensors = {tensor.name: tensor for tensor in (*graph.inputs, *graph.outputs)}
        self._cross = spec.cross.names("cross")
        self._past, self._present = spec.cache.names("past"), spec.cache.names("present")
        self._item_bytes = ITEM_BYTES[FLOAT[spec.precision]]
        self._order: Ids = device.pinned(device.engines.limits.max_batch, np.int64)
        self._order_was_read = device.event()
        device.memory.reserve({ORDER: self._order.nbytes})
        self._context = device.context(REORDER)
        self._recorded: LruCache[CudaGraphRunner] = LruCache(MAX_GRAPHS, device.synchronize)

    def sizes(self, layout: BatchLayout) -> dict[str, int]:
        """Return the size of each buffer in bytes."""
        twins = () if self._device.engines.updates_in_place else self._present
        return self._sizes((*self._cross, *self._past, *twins), layout)

    def twin_sizes(self, layout: BatchLayout) -> dict[str, int]:
        return self._sizes(self._present, layout)

    def copy_slots(self, layout: BatchLayout, copies: Sequence[SlotCopy], past_len: int) -> None:
        """Queue copies of whole slots; `layout` contains all of them."""
        for names, rows in ((self._cross, 1), (self._past, layout.width)):
            for name, row_bytes in self._row_bytes(names, layout, past_len).items():
                num_bytes, address = rows * row_bytes, self._device.memory[name]
                for source, target in copies:
                    start = address + target * num_bytes
                    self._device.cuda.copy(start, address + source * num_bytes, num_bytes, self._device.stream)

    def resize(self, before: BatchLayout, after: BatchLayout) -> None:
        """Queue the change of all slots to another source length and capacity."""
        device = self._device
        for names, rows in ((self._cross, after.size), (self._past, after.num_rows)):
            old, new = (self._row_bytes(names, layout, 0) for layout in (before, after))
            if old == new:
                continue
            device.memory.reserve({SCRATCH: rows * max(old.values())})
            pieces = rows * device.engines.spec.cross.heads
            for name in names:
                address, scratch = device.memory[name], device.memory[SCRATCH]
                was, now = (rows * sizes[name] for sizes in (old, new))
                device.cuda.copy(scratch, address, was, device.stream)
                # Zeros, because a masked position has weight 0, and 0 · NaN is NaN.
                device.cuda.clear(address, now, device.stream)
                device.cuda.copy_2d(address, now // pieces, scratch, was // pieces, pieces, device.stream)

    def clear_rows(self, layout: BatchLayout, num_rows: int) -> None:
        """Queue zeros for the first rows, because a NaN of an earlier batch would spread."""
        for name, row_bytes in self._row_bytes(self._past, layout, 0).items():
            self._device.cuda.clear(self._device.memory[name], num_rows * row_bytes, self._device.stream)

    def keep(self, num_rows: int) -> None:
        """Queue copies of the first rows of states from the twins, after a prefill."""
        if self._device.engines.spec.cache.grows:
            return
        for past, present in zip(self._past, self._present, strict=True):
            num_bytes = bytes_of(self._tensors[past], {"rows": num_rows})
            self._device.cuda.copy(
                self._device.memory[past], self._device.memory[present], num_bytes, self._device.stream
            )

    def reorder(self, layout: BatchLayout, order: Ids, past_len: int) -> None:
        """Queue a reorder: row r becomes row order[r], int64 [rows]; needs the twins."""
        row_bytes = self._row_bytes(self._past, layout, past_len)
        widths = {name: num_bytes // self._item_bytes for name, num_bytes in row_bytes.items()}
        pairs: dict[int, list[Pair]] = defaultdict(list)  # by elements in a row
        for name, twin in zip(self._past, self._present, strict=True):
            pairs[widths[name]].append((name, twin))
        self._device.cuda.wait(self._order_was_read)
        self._order[: order.size] = order
        for width, group in pairs.items():
            shapes = {CACHE: (order.size, width), ORDER: order.shape}
            if not self._device.engines.concatenates:
                self._replay(group, shapes, (layout.num_rows, layout.capacity, self.side, width))
            else:
                self._context.bind(shapes, {ORDER: self._device.memory[ORDER]})
                self._gather(self._context, group, order.size)
        self._device.cuda.record(self._order_was_read, self._device.stream)
        self.exchange()

    def exchange(self) -> None:
        """Swap the twins, so that the next step reads the newest."""
        for past, present in zip(self._past, self._present, strict=True):
            self._device.memory.exchange(past, present)
        self.side = 1 - self.side

    def forget(self) -> None:
        """Free the CUDA graphs before buffers move or the replica closes."""
        self._recorded.clear()

    def _sizes(self, names: Sequence[str], layout: BatchLayout) -> dict[str, int]:
        lengths = dict.fromkeys(("capacity", "past_len", "past_len + target_len"), layout.capacity)
        dims = {"batch": layout.size, "rows": layout.num_rows, "source_len": layout.source_len, **lengths}
        return {name: bytes_of(self._tensors[name], dims) for name in names}

    def _row_bytes(self, names: Sequence[str], layout: BatchLayout, past_len: int) -> dict[str, int]:
        lengths = {"source_len": layout.source_len, "capacity": layout.capacity, "past_len": past_len}
        dims = {"batch": 1, "rows": 1, **lengths}
        return {name: bytes_of(self._tensors[name], dims) for name in names}

    def _replay(self, pairs: Sequence[Pair], shapes: Mapping[str, Shape], key: tuple[int, ...]) -> None:
        device = self._device

        def make() -> CudaGraphRunner:
            context = device.context(REORDER, use="be captured")
            context.bind(shapes, {ORDER: device.memory[ORDER]})
            return CudaGraphRunner(context, device.cuda, device.stream, device.engines.capture_failed)

        runner = self._recorded.get(key, make)
        queue = partial(self._gather, runner.context, pairs, *shapes[ORDER])
        runner.run(REORDER, queue, lambda: runner.context.can_be_captured(device.stream))

    def _gather(self, context: Context, pairs: Sequence[Pair], num_rows: int) -> None:
        memory, stream = self._device.memory, self._device.stream
        self._device.cuda.upload(memory[ORDER], self._order[:num_rows], stream)
        for source, target in pairs:
            context.place({CACHE: memory[source], REORDERED: memory[target]})
            context.run(stream)
