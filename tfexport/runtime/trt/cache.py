"""Rows of caches moved on the device by the engine `reorder`, so that no cache crosses to the host."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tfexport.runtime.session import Ids
from tfexport.runtime.trt.engine import Context
from tfexport.runtime.trt.graphs import CudaGraphRunner
from tfexport.runtime.trt.lru import LruCache
from tfexport.runtime.trt.resources import ITEM_BYTES
from tfexport.runtime.trt.workspace import DeviceResources
from tfexport.spec import CACHE, FLOAT, ORDER, REORDER, REORDERED

SCRATCH = "scratch"
# Shapes of moves whose graphs are kept: a beam search has one, and one more for each time it closes up.
MAX_GRAPHS = 16


@dataclass(frozen=True)
class _Recorded:
    """A move that comes again: a context bound to each width, and the graph."""

    contexts: Mapping[int, Context]
    replay: CudaGraphRunner

    def close(self) -> None:
        self.replay.close()


class CacheReorder:
    """Moves rows within the buffers of one replica: each tensor through `scratch` and back to its place.

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

    def run(self, widths: Mapping[str, int], num_rows: int, order: Ids, *, replays: bool) -> None:
        """Queue: row r of each tensor becomes what row order[r] was.

        Args:
            widths: numbers in a row of each tensor, by name.
            num_rows: rows that the tensors have.
            order: int64 [new rows]; the buffers hold that many.
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
            self._replay(names, num_rows, order.size)
        else:
            self._upload(order.size)
            for width, group in names.items():
                self._bind(self._context, width, num_rows, order.size)
                self._move(self._context, group, width, order.size)
        self._device.cuda.record(self._order_was_read, self._device.stream)

    def forget(self) -> None:
        """Free the graphs, because buffers have moved or the replica closes."""
        self._recorded.clear()

    def _replay(self, names: Mapping[int, Sequence[str]], num_rows: int, new_rows: int) -> None:
        def record() -> _Recorded:
            contexts = {width: self._device.context(REORDER, use="be captured") for width in names}
            for width, context in contexts.items():
                self._bind(context, width, num_rows, new_rows)
            return _Recorded(contexts, CudaGraphRunner(self._device.cuda, self._device.stream))

        recorded = self._recorded.get((num_rows, new_rows), record)

        def queue() -> None:
            self._upload(new_rows)
            for width, group in names.items():
                self._move(recorded.contexts[width], group, width, new_rows)

        def can_capture() -> bool:
            return all(context.can_be_captured(self._device.stream) for context in recorded.contexts.values())

        recorded.replay.run(REORDER, queue, can_capture)

    def _upload(self, new_rows: int) -> None:
        self._device.cuda.upload(self._device.memory[ORDER], self._order[:new_rows], self._device.stream)

    def _bind(self, context: Context, width: int, num_rows: int, new_rows: int) -> None:
        shapes = {CACHE: (num_rows, width), ORDER: (new_rows,)}
        context.bind(shapes, {ORDER: self._device.memory[ORDER], REORDERED: self._device.memory[SCRATCH]})

    def _move(self, context: Context, names: Sequence[str], width: int, new_rows: int) -> None:
        for name in names:
            context.place({CACHE: self._device.memory[name]})
            context.run(self._device.stream)
            num_bytes = new_rows * width * self._item_bytes
            self._device.cuda.copy(
                self._device.memory[name], self._device.memory[SCRATCH], num_bytes, self._device.stream
            )
