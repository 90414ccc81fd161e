"""What decodes one batch at a time on the device, and the pool that hands it from batch to batch."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress

import numpy as np

from tfexport.errors import BackendError
from tfexport.runtime.session import Candidates, Floats, Ids, Mask
from tfexport.runtime.trt.decoder import Decoder
from tfexport.runtime.trt.encoder import Encoder
from tfexport.runtime.trt.layout import BatchLayout, CacheCopy
from tfexport.runtime.trt.workspace import DeviceResources, EngineSet

# Units that wait for a batch; what is freed beyond them is given back to the device.
MAX_FREE_REPLICAS = 4


class Replica:
    """A stream, buffers, contexts and graphs; they stay when a batch is done, and the next one uses them.

    Attributes:
        is_broken: something failed, and nobody knows what the device holds.
        key: lanes and source length of the newest batch.
    """

    def __init__(self, engines: EngineSet) -> None:
        """Make everything that every batch needs.

        Raises:
            BackendError: the device has too little memory, or the library refuses.
        """
        self.is_broken = False
        self.key = (0, 0)
        self._device = DeviceResources(engines)
        self._source_mask: Mask = np.empty((0, 0), np.bool_)
        try:
            self._encoder = Encoder(self._device)
            self._decoder = Decoder(self._device, engines.form) if engines.form else None
        except BaseException:
            self._device.close()
            raise

    @property
    def num_bytes(self) -> int:
        """Device memory that it holds."""
        return self._device.memory.num_bytes

    def encode(self, source_ids: Ids, source_mask: Mask, lanes: BatchLayout) -> None:
        """Queue the encoder and make room for the caches.

        Args:
            source_ids: int64 [lanes, source_len].
            source_mask: bool [lanes, source_len].
            lanes: of the batch, one row each.

        Raises:
            BackendError: the device has too little memory, or the engine refuses.
        """
        self.key, self._source_mask = source_ids.shape, source_mask
        moved = self._encoder.run(source_ids, source_mask)
        if self._decoder:
            self._decoder.begin(lanes, source_ids.shape[1], moved=moved)

    def step(self, lanes: BatchLayout, target_ids: Ids, past_len: int, num_candidates: int) -> Candidates:
        """Run a decoder step; see `Decoder.step`."""
        assert self._decoder
        return self._decoder.step(lanes, target_ids, past_len, num_candidates)

    def reorder(self, before: BatchLayout, after: BatchLayout, move: CacheCopy, past_len: int) -> None:
        """Queue what has to move; see `Decoder.reorder`."""
        assert self._decoder
        self._decoder.reorder(before, after, move, past_len)
        if move.sources is not None:
            self._source_mask = self._source_mask[move.sources]
            self._encoder.upload_mask(self._source_mask)

    def hidden_states(self, source_ids: Ids, source_mask: Mask) -> Floats:
        """Run an encoder alone, float32 [batch, source_len, d_model]."""
        self._encoder.run(source_ids, source_mask)
        return self._encoder.hidden_states(*source_ids.shape)

    def close(self) -> None:
        """Wait for what runs and free everything, as far as the device still does what it is told."""
        # After a fault every call of the device fails; the error that matters was raised when it happened.
        with suppress(BackendError):
            self._device.synchronize()
            if self._decoder:
                self._decoder.close()
            self._device.close()


class ReplicaPool:
    """The replicas of a session: as many as batches are being decoded, and a few that wait.

    Batches of different threads have different replicas. `give_back` may be called
    from anywhere, also by the garbage collector: it takes no lock and calls
    nothing of the device.
    """

    def __init__(self, engines: EngineSet) -> None:
        """Begin without a replica."""
        self._engines = engines
        self._lock = threading.Lock()
        self._replicas: list[Replica] = []
        self._free: deque[Replica] = deque()  # the one given back last is at the right end

    @property
    def num_bytes(self) -> int:
        """Device memory that all replicas hold."""
        return sum(replica.num_bytes for replica in list(self._replicas))

    def take(self, key: tuple[int, int]) -> Replica:
        """Return a replica that nobody uses, best one whose newest batch had the same key.

        Raises:
            BackendError: a new one is needed and the device has too little memory.
        """
        with self._lock:
            free = [self._free.pop() for _ in range(len(self._free))]
            usable = [replica for replica in free if not replica.is_broken]
            chosen = next((replica for replica in usable if replica.key == key), usable[0] if usable else None)
            kept = [replica for replica in usable if replica is not chosen][:MAX_FREE_REPLICAS]
            self._free.extendleft(kept)
            for replica in free:
                if replica is not chosen and replica not in kept:
                    self._replicas.remove(replica)
                    replica.close()
            if chosen is None:
                chosen = Replica(self._engines)
                self._replicas.append(chosen)
            return chosen

    def give_back(self, replica: Replica) -> None:
        """Let another batch have a replica."""
        self._free.append(replica)

    def close(self) -> None:
        """Free all replicas, also those in use."""
        with self._lock:
            self._free.clear()
            while self._replicas:
                self._replicas.pop().close()
