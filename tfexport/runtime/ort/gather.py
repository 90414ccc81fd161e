"""Rows moved on the device by the graph `reorder`, so that no cache crosses to the host."""

from __future__ import annotations

from pathlib import Path

import onnxruntime as ort

from tfexport.contract import CACHE, ORDER, REORDER, REORDERED, DType
from tfexport.errors import BackendError
from tfexport.runtime.ort.device import ELEMENT_TYPE, OrtDevice, run
from tfexport.runtime.session import Ids

# ONNX Runtime counts items in 32 bits (onnxruntime/core/providers/cuda/tensor/gather_impl.cu) and would not say so.
MOST_ITEMS = 2**31 - 1
ITEM_BYTES: dict[DType, int] = {"float32": 4, "float16": 2, "bfloat16": 2}


class RowGather:
    """The one graph that copies rows, on memory seen as [rows, width] whatever it holds.

    Attributes:
        device: where it runs.
        dtype: of what it moves.
    """

    def __init__(self, device: OrtDevice, graph: Path, dtype: DType) -> None:
        """Load the graph.

        Raises:
            BackendError: it does not load, or would run elsewhere.
        """
        self.device, self.dtype = device, dtype
        # Copies gain nothing from more threads, and idle threads spin where the decoder's would work.
        self._graph = device.load(graph, REORDER, 1)

    def copy(self, memory: ort.OrtValue, width: int, order: Ids, address: int) -> None:
        """Write row order[r] of some memory to row r of what lies at an address; the two may not overlap.

        Args:
            memory: on the device, a multiple of `width` long.
            width: of a row, in items.
            order: int64 of any shape.
            address: on the device, of room for as many rows as `order` has.

        Raises:
            BackendError: it failed, or there are more items than the graph can count.
        """
        kind, element = self.device.type, ELEMENT_TYPE[self.dtype]
        rows = memory.tensor_size_in_bytes() // ITEM_BYTES[self.dtype] // width
        items = max(rows, order.size) * width
        if items > MOST_ITEMS:
            raise BackendError(
                f"ort: caches of {items:,} numbers cannot be moved on a GPU, at most {MOST_ITEMS:,}; lower batch_size"
            )
        io, uploaded = self._graph.io_binding(), self.device.upload(order.ravel())
        io.bind_input(CACHE, kind, 0, element, [rows, width], memory.data_ptr())
        io.bind_ortvalue_input(ORDER, uploaded)
        io.bind_output(REORDERED, kind, 0, element, [order.size, width], address)
        run(self._graph, io)
