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
from tfexport.runtime.trt.lanes import Lanes, Move
from tfexport.runtime.trt.workspace import Engines, Workspace

# Units that wait for a batch; what is freed beyond them is given back to the device.
MAX_FREE_UNITS = 4


class Unit:
    """A stream, buffers, contexts and graphs; they stay when a batch is done, and the next one uses them.

    Attributes:
        is_broken: something failed, and nobody knows what the device holds.
        key: lanes and source length of the newest batch.
    """

    def __init__(self, engines: Engines) -> None:
        """Make everything that every batch needs.

        Raises:
            BackendError: the device has too little memory, or the library refuses.
        """
        self.is_broken = False
        self.key = (0, 0)
        self._work = Workspace(engines)
        self._source_mask: Mask = np.empty((0, 0), np.bool_)
        try:
            self._encoder = Encoder(self._work)
            self._decoder = Decoder(self._work, engines.form) if engines.form else None
        except BaseException:
            self._work.close()
            raise

    @property
    def num_bytes(self) -> int:
        """Device memory that it holds."""
        return self._work.memory.num_bytes

    def encode(self, source_ids: Ids, source_mask: Mask, lanes: Lanes) -> None:
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

    def step(self, lanes: Lanes, target_ids: Ids, past_len: int, num_candidates: int) -> Candidates:
        """Run a decoder step; see `Decoder.step`."""
        assert self._decoder
        return self._decoder.step(lanes, target_ids, past_len, num_candidates)

    def reorder(self, before: Lanes, after: Lanes, move: Move, past_len: int) -> None:
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
            self._work.synchronize()
            if self._decoder:
                self._decoder.close()
            self._work.close()


class Pool:
    """The units of a session: as many as batches are being decoded, and a few that wait.

    Batches of different threads have different units. `give_back` may be called
    from anywhere, also by the garbage collector: it takes no lock and calls
    nothing of the device.
    """

    def __init__(self, engines: Engines) -> None:
        """Begin without a unit."""
        self._engines = engines
        self._lock = threading.Lock()
        self._units: list[Unit] = []
        self._free: deque[Unit] = deque()  # the one given back last is at the right end

    @property
    def num_bytes(self) -> int:
        """Device memory that all units hold."""
        return sum(unit.num_bytes for unit in list(self._units))

    def take(self, key: tuple[int, int]) -> Unit:
        """Return a unit that nobody uses, best one whose newest batch had the same key.

        Raises:
            BackendError: a new one is needed and the device has too little memory.
        """
        with self._lock:
            free = [self._free.pop() for _ in range(len(self._free))]
            usable = [unit for unit in free if not unit.is_broken]
            chosen = next((unit for unit in usable if unit.key == key), usable[0] if usable else None)
            kept = [unit for unit in usable if unit is not chosen][:MAX_FREE_UNITS]
            self._free.extendleft(kept)
            for unit in free:
                if unit is not chosen and unit not in kept:
                    self._units.remove(unit)
                    unit.close()
            if chosen is None:
                chosen = Unit(self._engines)
                self._units.append(chosen)
            return chosen

    def give_back(self, unit: Unit) -> None:
        """Let another batch have a unit."""
        self._free.append(unit)

    def close(self) -> None:
        """Free all units, also those in use."""
        with self._lock:
            self._free.clear()
            while self._units:
                self._units.pop().close()
