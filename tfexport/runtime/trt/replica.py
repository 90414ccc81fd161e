"""What decodes one batch at a time on the device, and the pool that hands it from batch to batch."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

import numpy as np

from tfexport.errors import BackendError
from tfexport.runtime.session import Candidates, Floats, Ids, Mask
from tfexport.runtime.trt.cache import BatchLayout, Caches, SlotCopy, bucket
from tfexport.runtime.trt.engine import Context
from tfexport.runtime.trt.graphs import MAX_GRAPHS, LruCache
from tfexport.runtime.trt.resources import PREFILL, STEP, DeviceResources, EngineSet, bytes_of, shape_of
from tfexport.runtime.trt.step import FOUND, GIVEN, OverlappedStep, Sizes, Step, StepIO
from tfexport.spec import (
    ENCODER,
    HIDDEN_STATES,
    LOGITS,
    SOURCE_IDS,
    SOURCE_MASK,
    Form,
    decoder_graph,
    encoder_graph,
)
from tfexport.trt.config import decoder_plan

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


class Decoder:
    """Runs the decoder in buffers that outlive the batch.

    Static form: the caches are written in place, and addresses and shapes stay,
    so that steps are replayed. Concat form: each step writes a longer cache into
    the other one of two buffers.

    Attributes:
        caches: keys and values of source and target.
    """

    def __init__(self, device: DeviceResources, form: Form) -> None:
        """Make the step I/O, and the buffers whose size does not depend on the batch.

        Raises:
            BackendError: the device has too little memory, or the library refuses.
        """
        self._device, self._form = device, form
        spec, largest = device.engines.spec, Sizes.largest(device.engines.limits)
        given, found = (packed.num_bytes for packed in largest.packed(spec, form))
        logits = next(tensor for tensor in decoder_graph(spec, form).outputs if tensor.name == LOGITS)
        device.memory.reserve({GIVEN: given, FOUND: found, LOGITS: bytes_of(logits, largest.dims(0))})
        self._ios = (
            StepIO(device.cuda, device.event(), device.pinned, given, found),
            StepIO(device.cuda, device.event(), device.pinned, given, found),
        )
        self._overlapped = OverlappedStep(self._ios)
        self._contexts: dict[tuple[str, int], Context] = {}
        self._steps: LruCache[Step] = LruCache(MAX_GRAPHS, device.synchronize)
        self.caches = Caches(device, form)

    def prefill(self, layout: BatchLayout, prompts: Ids) -> None:
        """Read several tokens of rows that begin, those of the first slots, and wait.

        Args:
            layout: of the whole batch.
            prompts: int64 [new rows, target_len].
        """
        rows, target_len = prompts.shape
        sizes = Sizes(rows // layout.width, rows, layout.source_len, target_len, 1, layout.capacity)
        self._run_once(self._any_step(sizes), prompts, np.zeros(rows, np.int64))

    def step(self, layout: BatchLayout, target_ids: Ids, lengths: Ids, num_candidates: int) -> Candidates:
        """Run a step and wait for its results.

        Args:
            layout: of the batch.
            target_ids: int64 [rows].
            lengths: tokens in the cache of every row, int64 [rows].
            num_candidates: best tokens wanted a row.

        Raises:
            BackendError: the engine failed.
        """
        most = self._device.engines.limits.max_candidates
        count = bucket(num_candidates, most)
        sizes = Sizes(layout.size, layout.num_rows, layout.source_len, 1, count, layout.capacity)
        rows = layout.rows
        ids, past = np.zeros((2, layout.num_rows), np.int64)
        ids[rows], past[rows] = target_ids, lengths
        if self._form == "concat":
            step = self._any_step(sizes, int(lengths[0]))
            io = self._run_once(step, ids, past)
        else:
            step = self._graph_step(sizes)
            io = self._overlapped.run(step, ids, rows, past)
        return step.candidates(io, rows, num_candidates)

    def reorder(self, layout: BatchLayout, order: Ids, past_len: int) -> None:
        """Queue a reorder of rows; see `Caches.reorder`."""
        self.drop()
        if self._device.memory.reserve(self.caches.twin_sizes(layout)):
            self.forget()
        self.caches.reorder(layout, order, past_len)

    def drop(self) -> None:
        """Forget a step that is under way."""
        self._overlapped.drop()

    def forget(self) -> None:
        """Free what is bound to addresses that no longer hold, or will not."""
        self._steps.clear()
        self.caches.forget()

    def _graph_step(self, sizes: Sizes) -> Step:
        """Return a step of one token in the static form, which comes again."""

        def make() -> Step:
            context = self._device.context(self._plan(sizes), STEP, "be captured")
            return Step(self._device, sizes, context, replays=True)

        return self._steps.get((sizes, self.caches.side), make)

    def _any_step(self, sizes: Sizes, past_len: int = 0) -> Step:
        """Return a step whose shapes do not come again."""
        plan, profile = self._plan(sizes), PREFILL if sizes.target_len > 1 else STEP
        context = self._contexts.get((plan, profile))
        if context is None:
            context = self._contexts[plan, profile] = self._device.context(plan, profile)
        self._device.lend_activations(context, plan, profile)
        return Step(self._device, sizes, context, past_len)

    def _plan(self, sizes: Sizes) -> str:
        return decoder_plan(self._form, sizes.capacity, self._device.engines.limits)

    def _run_once(self, step: Step, ids: Ids, lengths: Ids) -> StepIO:
        self._overlapped.drop()
        io = self._ios[0]
        step.feed(io, ids, lengths)
        io.wait()
        if self._form == "concat":
            self.caches.exchange()
        return io


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
