"""The decoder of a replica: prefills, steps and reorders, in buffers that outlive the batch."""

from __future__ import annotations

import numpy as np

from tfexport.contract import LOGITS, TARGET_IDS, Form, decoder_graph
from tfexport.runtime.session import Candidates, Ids
from tfexport.tensorrt.config import decoder_plan
from tfexport.tensorrt.session.cache import BatchLayout, Caches, bucket
from tfexport.tensorrt.session.engine import Context
from tfexport.tensorrt.session.graphs import MAX_GRAPHS, LruCache
from tfexport.tensorrt.session.overlap import OverlappedStep
from tfexport.tensorrt.session.resources import PREFILL, STEP, DeviceResources, bytes_of
from tfexport.tensorrt.session.step import FOUND, GIVEN, Sizes, Step, StepIO


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

        A prefill reads as many at once as its profile takes; what is left for a single token is a step.

        Args:
            layout: of the whole batch.
            prompts: int64 [new rows, target_len].
        """
        rows, longest = prompts.shape
        plan = decoder_plan(self._form, layout.capacity, self._device.engines.limits)
        most = self._device.engines.engines[plan].largest_shape(TARGET_IDS, PREFILL)[1]
        for past_len in range(0, longest, most):
            piece = prompts[:, past_len : past_len + most]
            sizes = Sizes(rows // layout.width, rows, layout.source_len, piece.shape[1], 1, layout.capacity)
            self._run_once(self._any_step(sizes, past_len), piece, np.full(rows, past_len, np.int64))

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
