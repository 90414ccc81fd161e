"""The encoder on a unit's stream: a source goes in, and what the decoder reads of it stays on the device."""

from __future__ import annotations

import numpy as np

from tfexport.runtime.session import Floats, Ids, Mask
from tfexport.runtime.trt.memory import bytes_of, shape_of
from tfexport.runtime.trt.workspace import Workspace
from tfexport.spec import ENCODER, HIDDEN_STATES, SOURCE_IDS, SOURCE_MASK, encoder_graph


class Encoder:
    """Runs the encoder into the buffers of its outputs, which it makes as large as they must be."""

    def __init__(self, work: Workspace) -> None:
        """Make a context and pinned arrays for the largest source batch."""
        self._work, self._graph = work, encoder_graph(work.engines.spec)
        limits = work.engines.limits
        size = limits.max_batch * limits.max_source_length
        self._ids: Ids = work.pinned.array(size, np.int64)
        self._mask: Mask = work.pinned.array(size, np.bool_)
        self._context = work.context(ENCODER)

    def run(self, source_ids: Ids, source_mask: Mask) -> bool:
        """Queue the encoder.

        Args:
            source_ids: int64 [lanes, source_len].
            source_mask: bool [lanes, source_len].

        Returns:
            Whether buffers have moved.

        Raises:
            BackendError: the device has too little memory, or the engine refuses.
        """
        work, tensors = self._work, (*self._graph.inputs, *self._graph.outputs)
        sizes = {"batch": source_ids.shape[0], "source_len": source_ids.shape[1]}
        moved = work.memory.reserve({tensor.name: bytes_of(tensor, sizes) for tensor in tensors})
        self._context.bind(
            {tensor.name: shape_of(tensor, sizes) for tensor in self._graph.inputs},
            {tensor.name: work.memory[tensor.name] for tensor in tensors},
        )
        self.upload_mask(source_mask)
        self._ids[: source_ids.size] = source_ids.ravel()
        work.cuda.upload(work.memory[SOURCE_IDS], self._ids[: source_ids.size], work.stream)
        self._context.run(work.stream)
        return moved

    def upload_mask(self, source_mask: Mask) -> None:
        """Queue the source mask that the decoder reads, bool [lanes, source_len]."""
        self._work.synchronize()  # what was queued before may still read the pinned arrays
        self._mask[: source_mask.size] = source_mask.ravel()
        self._work.cuda.upload(self._work.memory[SOURCE_MASK], self._mask[: source_mask.size], self._work.stream)

    def hidden_states(self, batch: int, source_len: int) -> Floats:
        """Fetch what an encoder alone has computed, float32 [batch, source_len, d_model]."""
        work = self._work
        hidden = work.cuda.pinned((batch, source_len, work.engines.spec.d_model), np.float32)
        try:
            work.cuda.download(hidden, work.memory[HIDDEN_STATES], work.stream)
            work.synchronize()
            return hidden.copy()
        finally:
            work.cuda.unpin(hidden)
