"""The encoder of a replica: a source goes in, and what the decoder reads of it stays on the device."""

from __future__ import annotations

import numpy as np

from tfexport.contract import ENCODER, HIDDEN_STATES, SOURCE_IDS, SOURCE_MASK, encoder_graph
from tfexport.runtime.session import Floats, Ids, Mask
from tfexport.tensorrt.session.resources import DeviceResources, bytes_of, shape_of


class Encoder:
    """Runs the encoder: a source goes in, and what the decoder reads of it stays on the device."""

    def __init__(self, device: DeviceResources) -> None:
        """Make a context and pinned arrays for the largest source batch."""
        self._device, self._graph = device, encoder_graph(device.engines.spec)
        limits = device.engines.limits
        size = limits.max_batch * limits.max_source_length
        self._ids: Ids = device.pinned.array(size, np.int64)
        self._mask: Mask = device.pinned.array(size, np.bool_)
        self._context = device.context(ENCODER)

    def sizes(self, size: int, source_len: int) -> dict[str, int]:
        """Return the bytes that the buffers must have for so many slots and source tokens."""
        dims = {"batch": size, "source_len": source_len}
        return {tensor.name: bytes_of(tensor, dims) for tensor in (*self._graph.inputs, *self._graph.outputs)}

    def run(self, source_ids: Ids, source_mask: Mask) -> None:
        """Queue the encoder for the first slots.

        Args:
            source_ids: int64 [sources, source_len].
            source_mask: of all slots, bool [size, source_len].

        Raises:
            BackendError: the engine refuses.
        """
        device, dims = self._device, {"batch": source_ids.shape[0], "source_len": source_ids.shape[1]}
        self._context.bind(
            {tensor.name: shape_of(tensor, dims) for tensor in self._graph.inputs},
            {tensor.name: device.memory[tensor.name] for tensor in (*self._graph.inputs, *self._graph.outputs)},
        )
        self.upload_mask(source_mask)
        self._ids[: source_ids.size] = source_ids.ravel()
        device.cuda.upload(device.memory[SOURCE_IDS], self._ids[: source_ids.size], device.stream)
        self._context.run(device.stream)

    def upload_mask(self, source_mask: Mask) -> None:
        """Queue the source mask that encoder and decoder read, bool [size, source_len]."""
        self._device.synchronize()  # what was queued before may still read the pinned arrays
        mask = self._mask[: source_mask.size]
        mask[:] = source_mask.ravel()
        self._device.cuda.upload(self._device.memory[SOURCE_MASK], mask, self._device.stream)

    def hidden_states(self, batch: int, source_len: int) -> Floats:
        """Fetch what an encoder alone has computed, float32 [batch, source_len, d_model]."""
        device = self._device
        hidden = device.cuda.pinned((batch, source_len, device.engines.spec.d_model), np.float32)
        try:
            device.cuda.download(hidden, device.memory[HIDDEN_STATES], device.stream)
            device.synchronize()
            return hidden.copy()
        finally:
            device.cuda.unpin(hidden)
