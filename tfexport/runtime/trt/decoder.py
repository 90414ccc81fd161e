"""The decoder on a replica's stream: caches, steps and moves of one batch."""

from __future__ import annotations

import math

import numpy as np

from tfexport.runtime.session import Candidates, Ids
from tfexport.runtime.trt.cache import SCRATCH, CacheReorder
from tfexport.runtime.trt.engine import Context
from tfexport.runtime.trt.layout import BatchLayout, CacheCopy, bucket
from tfexport.runtime.trt.lru import LruCache
from tfexport.runtime.trt.overlapped import OverlappedStep
from tfexport.runtime.trt.resources import StepIO, bytes_of, shape_of
from tfexport.runtime.trt.step import Sizes, Step
from tfexport.runtime.trt.workspace import DeviceResources
from tfexport.spec import (
    CACHE_LENGTHS,
    CANDIDATE_IDS,
    CANDIDATE_LOGITS,
    DECODER,
    LOG_NORMALIZER,
    LOGITS,
    TARGET_IDS,
    Form,
    decoder_graph,
    key_value_names,
)

STEP, PREFILL = 0, 1  # optimization profiles of a decoder
# Shapes of steps whose graphs a replica keeps.
MAX_STEPS = 16


class Decoder:
    """Decodes one batch at a time in buffers that outlive it.

    Static form: the caches are written in place, and addresses and shapes stay,
    so that steps are replayed. Concat form: each step writes a longer cache into
    the other one of two buffers.
    """

    def __init__(self, device: DeviceResources, form: Form) -> None:
        """Make the step I/O, and the buffers whose size does not depend on the batch.

        Raises:
            BackendError: the device has too little memory, or the library refuses.
        """
        self._device, self._form = device, form
        limits, layers = device.engines.limits, device.engines.spec.layers
        graph = decoder_graph(device.engines.spec, form)
        self._tensors = {tensor.name: tensor for tensor in (*graph.inputs, *graph.outputs)}
        self._past, self._cross = key_value_names("past", layers), key_value_names("cross", layers)
        self._present = key_value_names("present", layers)
        self._source_len = 0
        largest = {
            "rows": limits.max_batch,
            "target_len": limits.max_target_length,
            "num_candidates": limits.max_candidates,
        }
        names = (TARGET_IDS, CACHE_LENGTHS, LOGITS, CANDIDATE_IDS, CANDIDATE_LOGITS, LOG_NORMALIZER)
        device.memory.reserve({name: bytes_of(self._tensors[name], largest) for name in names if name in self._tensors})
        self._ios = (
            StepIO(device.cuda, device.event(), device.pinned, limits),
            StepIO(device.cuda, device.event(), device.pinned, limits),
        )
        self._ahead = OverlappedStep(self._ios)
        self._contexts: dict[int, Context] = {}
        self._steps: LruCache[Step] = LruCache(MAX_STEPS, device.synchronize)
        self._reorder = CacheReorder(device)

    def begin(self, lanes: BatchLayout, source_len: int, *, moved: bool) -> None:
        """Make room for a new batch, with empty caches.

        Args:
            lanes: of the batch.
            source_len: of the source, padding included.
            moved: whether buffers that steps are bound to have moved already.

        Raises:
            BackendError: the device has too little memory.
        """
        self._ahead.drop()
        self._source_len = source_len
        if moved:
            self._forget()
        self._reserve(lanes)
        if self._form == "static":
            # Zeros, not what the last batch left: a masked place has weight 0, and 0 · NaN is NaN.
            for name in self._past:
                num_bytes = bytes_of(self._tensors[name], self._dims(lanes))
                self._device.cuda.clear(self._device.memory[name], num_bytes, self._device.stream)

    def step(self, lanes: BatchLayout, target_ids: Ids, past_len: int, num_candidates: int) -> Candidates:
        """Run a step and wait for its results.

        Args:
            lanes: of the batch.
            target_ids: int64 [rows, target_len].
            past_len: tokens in the cache of every row.
            num_candidates: best tokens wanted a row.

        Raises:
            BackendError: the engine failed.
        """
        ids = np.zeros((lanes.num_rows, target_ids.shape[1]), np.int64)
        ids[lanes.rows] = target_ids
        sizes = Sizes(
            batch=lanes.width,
            rows=lanes.num_rows,
            source_len=self._source_len,
            target_len=target_ids.shape[1],
            num_candidates=bucket(num_candidates, self._device.engines.limits.max_candidates),
        )
        if self._form == "static":
            io = self._run_static(sizes, ids, lanes.rows, past_len)
        else:
            io = self._run_concat(sizes, ids, past_len)
        return io.candidates(sizes.rows, sizes.num_candidates, lanes.rows, num_candidates)

    def reorder(self, before: BatchLayout, after: BatchLayout, move: CacheCopy, past_len: int) -> None:
        """Queue what has to move on the device; where nothing does, a step under way stays valid.

        Args:
            before: lanes as they are.
            after: lanes as they will be.
            move: what `BatchLayout.reorder` gave with them.
            past_len: tokens in the cache of every row.

        Raises:
            BackendError: the device has too little memory, or the engine refuses.
        """
        if move.sources is None and move.rows is None:
            return
        self._ahead.drop()
        self._reserve(after)
        if move.sources is not None:
            self._reorder.run(self._widths(self._cross), before.width, move.sources, replays=False)
        if move.rows is not None and (self._form == "static" or past_len > 0):
            widths = self._widths(self._past, past_len)
            self._reorder.run(widths, before.num_rows, move.rows, replays=self._form == "static")

    def close(self) -> None:
        """Free the graphs; nothing may run."""
        self._forget()

    def _run_static(self, sizes: Sizes, ids: Ids, read: Ids, past_len: int) -> StepIO:
        if sizes.target_len > 1:
            return self._run_once(Step(self._device, sizes, self._context(PREFILL)), ids, past_len)
        step = self._steps.get(
            sizes,
            lambda: Step(self._device, sizes, self._device.context(DECODER[self._form], STEP, "be captured")),
        )
        if sizes.num_candidates == 1:
            return self._ahead.run(step, ids, read, past_len)
        return self._run_once(step, ids, past_len)

    def _run_concat(self, sizes: Sizes, ids: Ids, past_len: int) -> StepIO:
        context = self._context(PREFILL if sizes.target_len > 1 else STEP)
        io = self._run_once(Step(self._device, sizes, context, past_len), ids, past_len)
        for past, present in zip(self._past, self._present, strict=True):
            self._device.memory.exchange(past, present)
        return io

    def _run_once(self, step: Step, ids: Ids, past_len: int) -> StepIO:
        self._ahead.drop()
        io = self._ios[0]
        step.feed(io, ids, past_len)
        io.wait()
        return io

    def _context(self, profile: int) -> Context:
        """Return the context for steps of any shape."""
        if profile not in self._contexts:
            self._contexts[profile] = self._device.context(DECODER[self._form], profile)
        return self._contexts[profile]

    def _reserve(self, lanes: BatchLayout) -> None:
        dims = self._dims(lanes)
        caches = [*self._past, *(self._present if self._form == "concat" else ())]
        sizes = {name: bytes_of(self._tensors[name], dims) for name in caches}
        largest = max(bytes_of(self._tensors[name], dims) for name in (*self._past, *self._cross))
        if self._device.memory.reserve({**sizes, SCRATCH: largest}):
            self._forget()

    def _forget(self) -> None:
        """Drop what is bound to addresses that no longer hold."""
        self._steps.clear()
        self._reorder.forget()

    def _dims(self, lanes: BatchLayout) -> dict[str, int]:
        capacity = self._device.engines.limits.max_target_length
        lengths = dict.fromkeys(("capacity", "past_len", "past_len + target_len"), capacity)
        return {"batch": lanes.width, "rows": lanes.num_rows, "source_len": self._source_len, **lengths}

    def _widths(self, names: list[str], past_len: int = 0) -> dict[str, int]:
        """Return how many numbers a row of each tensor has."""
        capacity = self._device.engines.limits.max_target_length
        dims = {"batch": 1, "rows": 1, "source_len": self._source_len, "capacity": capacity, "past_len": past_len}
        return {name: math.prod(shape_of(self._tensors[name], dims)) for name in names}
