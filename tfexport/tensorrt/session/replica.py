"""What decodes one batch at a time on the device, and the pool that hands it from batch to batch."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

from tfexport.errors import BackendError
from tfexport.runtime.session import Candidates, Floats, Ids, Mask
from tfexport.tensorrt.session.cache import BatchLayout, SlotCopy
from tfexport.tensorrt.session.decoder import Decoder
from tfexport.tensorrt.session.encoder import Encoder
from tfexport.tensorrt.session.resources import DeviceResources, EngineSet

# Replicas that wait for a batch; what is freed beyond them is given back to the device.
MAX_FREE_REPLICAS = 4

Key = tuple[int, int, int]  # slots, rows of each, source length


class Replica:
    """A stream, buffers, contexts and graphs; they stay when a batch is done, and the next one uses them.

    Attributes:
        is_broken: something failed, and nobody knows what the device holds.
        key: of the newest batch, when sources were last added.
    """

    def __init__(self, engines: EngineSet) -> None:
        """Make everything that every batch needs.

        Raises:
            BackendError: the device has too little memory, or the library refuses.
        """
        self.is_broken = False
        self.key: Key = (0, 0, 0)
        self._device = DeviceResources(engines)
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

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Mark the replica when something in the block fails: no other batch gets it, and this one ends.

        Raises:
            BackendError: something has failed before.
        """
        if self.is_broken:
            raise BackendError("trt: this batch has failed before; open another one")
        try:
            yield
        except BaseException:
            self.is_broken = True
            raise

    def add(self, before: BatchLayout, after: BatchLayout, copies: Sequence[SlotCopy], past_len: int) -> None:
        """Make room for new sources in the first slots; a step under way is dropped.

        Args:
            before: as the sources lie.
            after: as those that were there will lie, none of them in the first slots.
            copies: that lead from one to the other.
            past_len: tokens in the caches of the concat form.

        Raises:
            BackendError: the device has too little memory.
        """
        assert self._decoder
        self.key = (after.size, after.width, after.source_len)
        held = replace(before, size=max(before.size, after.size))
        self._decoder.drop()
        self._reserve(held, after)
        self._decoder.caches.copy_slots(held, copies, past_len)
        if before.slots.size:
            self._decoder.caches.resize(held, after)

    def read(self, layout: BatchLayout, source_ids: Ids, source_mask: Mask, prompts: Ids) -> None:
        """Read new sources into the first slots, and all but the last token of their prompts.

        Args:
            layout: of the whole batch.
            source_ids: int64 [new sources, source_len].
            source_mask: of all slots, bool [size, source_len].
            prompts: what is read of them, int64 [new rows, target_len]; target_len may be 0.

        Raises:
            BackendError: an engine refuses or failed.
        """
        assert self._decoder
        self._decoder.caches.clear_rows(layout, len(prompts))
        self._encoder.run(source_ids, source_mask)
        if prompts.size:
            self._decoder.prefill(layout, prompts)

    def fit(
        self,
        before: BatchLayout,
        after: BatchLayout,
        copies: Sequence[SlotCopy],
        source_mask: Mask,
        past_len: int,
    ) -> None:
        """Queue another size and capacity, before a step of these; a step under way is dropped.

        Args:
            before: as the sources lie.
            after: as they will lie.
            copies: of slots, that lead from one to the other.
            source_mask: of all slots afterwards, bool [size, source_len].
            past_len: tokens in the caches of the concat form.

        Raises:
            BackendError: the device has too little memory.
        """
        assert self._decoder
        self._decoder.drop()
        self._decoder.caches.copy_slots(before, copies, past_len)
        if copies:
            self._encoder.upload_mask(source_mask)
        if before.capacity != after.capacity:
            self._reserve(before, after)
            self._decoder.caches.resize(before, after)

    def step(self, layout: BatchLayout, target_ids: Ids, lengths: Ids, num_candidates: int) -> Candidates:
        """Run a decoder step; see `Decoder.step`."""
        assert self._decoder
        return self._decoder.step(layout, target_ids, lengths, num_candidates)

    def reorder(self, layout: BatchLayout, order: Ids, past_len: int) -> None:
        """Queue: row r becomes what row order[r] was, int64 [rows on the device]; a step under way is dropped."""
        assert self._decoder
        self._decoder.reorder(layout, order, past_len)

    def hidden_states(self, source_ids: Ids, source_mask: Mask) -> Floats:
        """Run an encoder alone, float32 [batch, source_len, d_model]."""
        self._device.memory.reserve(self._encoder.sizes(*source_ids.shape))
        self._encoder.run(source_ids, source_mask)
        return self._encoder.hidden_states(*source_ids.shape)

    def _reserve(self, *layouts: BatchLayout) -> None:
        """Make room for each of some layouts; what was captured on addresses that no longer hold is forgotten."""
        assert self._decoder
        decoder, most = self._decoder, dict[str, int]()
        for layout in layouts:
            sizes = self._encoder.sizes(layout.size, layout.source_len) | decoder.caches.sizes(layout)
            most = {name: max(size, most.get(name, 0)) for name, size in sizes.items()}
        if self._device.memory.reserve(most):
            decoder.forget()

    def close(self) -> None:
        """Wait for what runs and free everything, as far as the device still does what it is told."""
        # After a fault every call of the device fails; the error that matters was raised when it happened.
        with suppress(BackendError):
            self._device.synchronize()
            if self._decoder:
                self._decoder.forget()
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

    def take(self, key: Key) -> Replica:
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
