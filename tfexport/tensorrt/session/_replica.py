"""Decode one batch at a time on the GPU, and pool the replicas of a session."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

import numpy as np

from tfexport._io.phases import phase
from tfexport.contract import ENCODER, SOURCE_MASK, TARGET_IDS, Variant, encoder_graph
from tfexport.errors import BackendError
from tfexport.runtime.session import Candidates, Floats, Ids, Mask
from tfexport.runtime.sources import Sources
from tfexport.tensorrt.config import PREFILL, STEP, decoder_plan
from tfexport.tensorrt.session._cache import BatchLayout, Caches, SlotCopy, bucket
from tfexport.tensorrt.session._engine import MAX_GRAPHS, Context, LruCache
from tfexport.tensorrt.session._resources import DeviceResources, EngineSet, bytes_of, shape_of
from tfexport.tensorrt.session._step import INPUTS, OUTPUTS, OverlappedStep, Sizes, Step, StepIO, buffer_bytes

# Free replicas to keep for later batches; the memory of others is freed.
MAX_FREE_REPLICAS = 4

Key = tuple[int, int, int]  # slots, rows per slot, source length


class Encoder:
    """Runs the encoder; its outputs stay on the device for the decoder."""

    def __init__(self, device: DeviceResources) -> None:
        self._device, self._graph = device, encoder_graph(device.engines.spec)
        limits, kind = device.engines.limits, device.engines.spec.source
        dims = {"batch": limits.max_batch, **kind.sizes(limits.max_source_length)}
        self._mask: Mask = device.pinned(limits.max_batch * limits.max_source_length, np.bool_)
        # Pinned copies of the inputs; the mask of token ids is that of the decoder.
        own = [tensor for tensor in self._graph.inputs if tensor.name != SOURCE_MASK]
        self._inputs = {one.name: device.pinned(math.prod(shape_of(one, dims)), np.dtype(one.dtype)) for one in own}
        self._context = device.context(ENCODER)

    def sizes(self, size: int, source_len: int) -> dict[str, int]:
        dims = {"batch": size, "source_len": source_len, **self._device.engines.spec.source.sizes(source_len)}
        tensors = (*self._graph.inputs, *self._graph.outputs)
        return {SOURCE_MASK: size * source_len, **{tensor.name: bytes_of(tensor, dims) for tensor in tensors}}

    @phase("encode")
    def run(self, sources: Sources, source_mask: Mask) -> None:
        """Queue the encoder for the first slots; `source_mask` is that of all slots."""
        device = self._device
        self._context.bind(
            {name: array.shape for name, array in sources.inputs.items()},
            {tensor.name: device.memory[tensor.name] for tensor in (*self._graph.inputs, *self._graph.outputs)},
        )
        self.upload_mask(source_mask)
        for name, pinned in self._inputs.items():
            array = sources.inputs[name]
            pinned[: array.size] = array.ravel()
            device.cuda.upload(device.memory[name], pinned[: array.size], device.stream)
        self._context.run(device.stream)

    def upload_mask(self, source_mask: Mask) -> None:
        """Queue the upload of the source mask of all slots, [size, source_len]."""
        self._device.synchronize()  # earlier work may still read the pinned arrays
        mask = self._mask[: source_mask.size]
        mask[:] = source_mask.ravel()
        self._device.cuda.upload(self._device.memory[SOURCE_MASK], mask, self._device.stream)

    def output(self, name: str, batch: int, source_len: int) -> Floats:
        """Copy an output of the encoder to the host, float32."""
        device, dims = self._device, {"batch": batch, "source_len": source_len}
        (shape,) = (shape_of(tensor, dims) for tensor in self._graph.outputs if tensor.name == name)
        found = device.cuda.pinned(shape, np.float32)
        try:
            device.cuda.download(found, device.memory[name], device.stream)
            device.synchronize()
            return found.copy()
        finally:
            device.cuda.unpin(found)


class Decoder:
    """Runs prefills, decode steps and reorders in buffers that outlive the batch."""

    def __init__(self, device: DeviceResources, variant: Variant) -> None:
        self._device, self._variant = device, variant
        sizes = buffer_bytes(device.engines.limits, device.engines.spec, variant)
        device.memory.reserve(sizes)
        self._ios = StepIO(device, sizes[INPUTS], sizes[OUTPUTS]), StepIO(device, sizes[INPUTS], sizes[OUTPUTS])
        self.overlapped = OverlappedStep(self._ios)
        self._contexts: dict[tuple[str, int], Context] = {}
        self._steps: LruCache[Step] = LruCache(MAX_GRAPHS, device.synchronize)
        self.caches = Caches(device, variant)

    @phase("prefill")
    def prefill(self, layout: BatchLayout, prompts: Ids, lengths: Ids) -> None:
        """Read prompts, int64 [new rows, target_len], into the first slots, and wait."""
        rows, longest = prompts.shape
        most = 1
        engine = self._device.engines.engines[self._plan(layout.capacity)]
        if longest > 1 and engine.num_profiles > PREFILL:
            most = engine.largest_shape(TARGET_IDS, PREFILL)[1]
        for past_len in range(0, longest, most):  # a single remaining token is a step
            piece = prompts[:, past_len : past_len + most]
            sizes = Sizes(rows // layout.width, rows, layout.source_len, piece.shape[1], 1, layout.capacity)
            self._run_once(self._any_step(sizes, past_len), piece, lengths + past_len)
            if self._device.engines.concatenates:
                self.caches.exchange()
            else:
                self.caches.keep(rows)

    @phase("step")
    def step(self, layout: BatchLayout, target_ids: Ids, lengths: Ids, num_candidates: int) -> Candidates:
        """Run a step and wait; ids and lengths (tokens in the caches) are int64 [rows]."""
        count = bucket(num_candidates, self._device.engines.limits.max_candidates)
        sizes = Sizes(layout.size, layout.num_rows, layout.source_len, 1, count, layout.capacity)
        rows = layout.rows
        ids, past = np.zeros((2, layout.num_rows), np.int64)
        ids[rows], past[rows] = target_ids, lengths
        if self._device.engines.concatenates:
            step = self._any_step(sizes, int(lengths[0]))
            io = self._run_once(step, ids, past)
            self.caches.exchange()
        else:
            step = self._graph_step(sizes)
            io = self.overlapped.run(step, ids, rows, past, lambda: self._following(sizes))
        return step.candidates(io, rows, num_candidates)

    @phase("reorder")
    def reorder(self, layout: BatchLayout, order: Ids, past_len: int) -> None:
        """Queue a reorder: row r becomes row order[r]."""
        self.overlapped.drop()
        if self._device.memory.reserve(self.caches.twin_sizes(layout)):
            self.forget()
        self.caches.reorder(layout, order, past_len)

    def forget(self) -> None:
        """Free CUDA graphs whose addresses are or soon will be invalid."""
        self._steps.clear()
        self.caches.forget()

    def _graph_step(self, sizes: Sizes) -> Step:
        def make() -> Step:
            context = self._device.context(self._plan(sizes.capacity), STEP, "be captured")
            return Step(self._device, sizes, context, replays=True)

        return self._steps.get((sizes, self.caches.side), make)

    def _following(self, sizes: Sizes) -> Step:
        if not self._device.engines.updates_in_place:
            self.caches.exchange()
        return self._graph_step(sizes)

    def _any_step(self, sizes: Sizes, past_len: int) -> Step:
        plan, profile = self._plan(sizes.capacity), PREFILL if sizes.target_len > 1 else STEP
        context = self._contexts.get((plan, profile))
        if context is None:
            context = self._contexts[plan, profile] = self._device.context(plan, profile)
        self._device.lend_activations(context, plan, profile)
        return Step(self._device, sizes, context, past_len)

    def _plan(self, capacity: int) -> str:
        return decoder_plan(self._variant, capacity, self._device.engines.limits)

    def _run_once(self, step: Step, ids: Ids, lengths: Ids) -> StepIO:
        self.overlapped.drop()
        io = self._ios[0]
        step.feed(io, ids, lengths)
        io.wait()
        return io


class Replica:
    """A stream with buffers, contexts and CUDA graphs that successive batches use."""

    def __init__(self, engines: EngineSet) -> None:
        self.is_broken = False  # a call failed, so the state of the device is unknown
        self.key: Key = (0, 0, 0)  # when sources were added last
        self._device = DeviceResources(engines)
        try:
            self.encoder = Encoder(self._device)
            self._decoder = Decoder(self._device, engines.variant) if engines.variant else None
        except BaseException:
            self._device.close()
            raise

    @property
    def decoder(self) -> Decoder:
        assert self._decoder
        return self._decoder

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Mark the replica as broken if the block fails; raise if it is broken already."""
        if self.is_broken:
            raise BackendError("trt: this batch has failed before; open another one")
        try:
            with self._device.cuda.current():
                yield
        except BaseException:
            self.is_broken = True
            raise

    def rearrange(self, before: BatchLayout, after: BatchLayout, copies: Sequence[SlotCopy], past_len: int) -> None:
        """Queue the change to another layout; `copies` move sources to new slots."""
        held = replace(before, size=max(before.size, after.size))
        self.decoder.overlapped.drop()
        self._reserve(held, after)
        self.decoder.caches.copy_slots(held, copies, past_len)
        if before.slots.size:
            self.decoder.caches.resize(held, after)

    def read(
        self,
        layout: BatchLayout,
        sources: Sources,
        source_mask: Mask,
        num_rows: int,
        prompts: Sequence[tuple[Ids, Ids]],
    ) -> None:
        """Encode sources into the first slots, and read pieces of their prompts."""
        self.key = (layout.size, layout.width, layout.source_len)
        self.decoder.caches.clear_rows(layout, num_rows)
        self.encoder.run(sources, source_mask)
        for target_ids, lengths in prompts:
            self.decoder.prefill(layout, target_ids, lengths)

    def encode(self, sources: Sources, output: str) -> Floats:
        """Run an encoder-only bundle and return one of its outputs."""
        sources = sources.resized(sources.source_len)
        self._device.memory.reserve(self.encoder.sizes(*sources.mask.shape))
        self.encoder.run(sources, sources.mask)
        return self.encoder.output(output, *sources.mask.shape)

    def _reserve(self, *layouts: BatchLayout) -> None:
        most = dict[str, int]()
        for layout in layouts:
            sizes = self.encoder.sizes(layout.size, layout.source_len) | self.decoder.caches.sizes(layout)
            most = {name: max(size, most.get(name, 0)) for name, size in sizes.items()}
        if self._device.memory.reserve(most):  # graphs contain the old addresses
            self.decoder.forget()

    def close(self) -> None:
        """Wait for running work and free everything, unless the device has failed."""
        # After a fault every call of the device fails; the error that matters was raised when it happened.
        with suppress(BackendError):
            self._device.synchronize()
            if self._decoder:
                self._decoder.forget()
            self._device.close()


class ReplicaPool:
    """The replicas of a session: one per running batch, and a few free ones."""

    def __init__(self, engines: EngineSet) -> None:
        self._engines = engines
        self._lock = threading.Lock()
        self._replicas: list[Replica] = []
        self._free: deque[Replica] = deque()  # the newest is at the right end

    @property
    def num_bytes(self) -> int:
        return sum(replica._device.memory.num_bytes for replica in list(self._replicas))

    def take(self, key: Key) -> Replica:
        """Return a free replica, preferably of the same key, or make one."""
        with self._lock, self._engines.cuda.current():
            free = [self._free.pop() for _ in range(len(self._free))]
            usable = sorted((replica for replica in free if not replica.is_broken), key=lambda one: one.key != key)
            remaining = usable[: 1 + MAX_FREE_REPLICAS]
            self._free.extendleft(remaining[1:])
            for replica in free:
                if replica not in remaining:
                    self._replicas.remove(replica)
                    replica.close()
            if not remaining:
                remaining = [Replica(self._engines)]
                self._replicas += remaining
            return remaining[0]

    def give_back(self, replica: Replica) -> None:
        # The garbage collector may call this, so it takes no lock and does not use the device.
        self._free.append(replica)

    def close(self) -> None:
        with self._lock:
            self._free.clear()
            while self._replicas:
                self._replicas.pop().close()
