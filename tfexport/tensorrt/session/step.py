"""One shape of decoder step: what the host gives it and gets from it."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from tfexport.contract import (
    CACHE_LENGTHS,
    CANDIDATE_IDS,
    CANDIDATE_LOGITS,
    LOG_NORMALIZER,
    NUM_CANDIDATES,
    TARGET_IDS,
    Form,
    ModelSpec,
    decoder_graph,
)
from tfexport.runtime.session import Candidates, Ids
from tfexport.tensorrt.config import EngineLimits, decoder_plan
from tfexport.tensorrt.cuda import Cuda
from tfexport.tensorrt.session.engine import Context
from tfexport.tensorrt.session.graphs import CudaGraphRunner
from tfexport.tensorrt.session.resources import Bytes, DeviceResources, Packing, Pinned, shape_of

# Buffers of the device: what a step reads of the host, and what the host reads of a step.
GIVEN, FOUND = "given", "found"
_FOUND = (CANDIDATE_IDS, CANDIDATE_LOGITS, LOG_NORMALIZER)
_ITEM = np.dtype(np.int64).itemsize


class StepIO:
    """What the host gives a step and gets from it: two pinned buffers, and the event behind the step.

    From the launch until `wait` returns, they belong to the device.

    Attributes:
        given: uint8 [bytes], laid out by `Step.given`.
        found: uint8 [bytes], laid out by `Step.found`.
    """

    def __init__(self, cuda: Cuda, event: int, pinned: Pinned, given: int, found: int) -> None:
        """Make room for so many bytes."""
        self.given: Bytes = pinned.array(given, np.uint8)
        self.found: Bytes = pinned.array(found, np.uint8)
        self._cuda, self._event = cuda, event

    def record(self, stream: int) -> None:
        """Mark the end of the step that was just queued."""
        self._cuda.record(self._event, stream)

    def wait(self) -> None:
        """Wait for the newest step that used these buffers."""
        self._cuda.wait(self._event)


@dataclass(frozen=True)
class Sizes:
    """The dimensions of a step: slots and rows on the device, not those that are read."""

    batch: int
    rows: int
    source_len: int
    target_len: int
    num_candidates: int
    capacity: int

    @classmethod
    def largest(cls, limits: EngineLimits) -> Sizes:
        """Return the largest step that engines take."""
        rows, length = limits.max_batch, limits.max_target_length
        return cls(rows, rows, limits.max_source_length, length, limits.max_candidates, length)

    def dims(self, past_len: int) -> dict[str, int]:
        """Return every named dimension of the decoder's contract."""
        return {**asdict(self), "past_len": past_len, "past_len + target_len": past_len + self.target_len}

    def packed(self, spec: ModelSpec, form: Form) -> tuple[Packing, Packing]:
        """Return how the host's side of a step is laid out: what it gives, lengths first, and what it gets."""
        graph, dims = decoder_graph(spec, form), self.dims(0)
        given = {tensor.name: tensor for tensor in graph.inputs if tensor.name in (CACHE_LENGTHS, TARGET_IDS)}
        found = {tensor.name: tensor for tensor in graph.outputs if tensor.name in _FOUND}
        in_order = [given[name] for name in (CACHE_LENGTHS, TARGET_IDS) if name in given]
        return Packing(in_order, dims), Packing((found[name] for name in _FOUND), dims)


class Step:
    """A step of one shape in one replica.

    `feed` takes the tokens from the host, `follow` takes those that the step
    before has found best, without leaving the device. Both queue everything, the
    results included, and return at once. A step that comes again is a CUDA graph
    from its second time on. Where the library cannot be captured
    from outside it is asked to capture by itself; never both.

    Attributes:
        sizes: of this step.
        given: how `StepIO.given` is laid out.
        found: how `StepIO.found` is laid out.
    """

    def __init__(
        self, device: DeviceResources, sizes: Sizes, context: Context, past_len: int = 0, *, replays: bool = False
    ) -> None:
        """Give a context all its shapes and addresses.

        Args:
            device: with buffers that are large enough.
            sizes: of the step.
            context: of the decoder, in the profile for these sizes.
            past_len: tokens in the cache; the static form does not ask for it here.
            replays: whether the step comes again with the same shapes and addresses.

        Raises:
            BackendError: the engine refuses a shape.
        """
        form = device.engines.form
        assert form is not None
        self.sizes, self._form = sizes, form
        self.given, self.found = sizes.packed(device.engines.spec, form)
        self._device, self._context, self._past_len, self._replays = device, context, past_len, replays
        self._runner = CudaGraphRunner(device.cuda, device.stream, device.engines.capture)
        # Shapes depend on it, so the library reads it on the host, whenever it is given a run.
        self._num_candidates = np.array([sizes.num_candidates], np.int64)
        self._bind()

    def feed(self, io: StepIO, target_ids: Ids, lengths: Ids) -> None:
        """Queue the step on tokens of the host.

        Args:
            io: not in use; in use until its `wait` returns.
            target_ids: int64, flat [rows · target_len].
            lengths: tokens in the cache of every row, int64 [rows].
        """
        self.given.view(TARGET_IDS, io.given)[:] = target_ids.reshape(self.sizes.rows, self.sizes.target_len)
        self._launch("feed", io, lengths)

    def follow(self, io: StepIO, lengths: Ids, number: int) -> None:
        """Queue the step on the tokens that the newest step, which was one of these sizes, found best.

        Args:
            io: not in use; in use until its `wait` returns.
            lengths: tokens in the cache of every row, those of the newest step included, int64 [rows].
            number: of the step I/O; each has a graph of its own.
        """
        self._launch(f"follow {number}", io, lengths)

    def best(self, io: StepIO) -> Ids:
        """Copy out the best token of every row, int64 [rows]."""
        found: Ids = self.found.view(CANDIDATE_IDS, io.found)[:, 0].copy()
        return found

    def candidates(self, io: StepIO, rows: Ids, wanted: int) -> Candidates:
        """Copy out what the step has found.

        Args:
            io: that was waited for.
            rows: those to copy, int64 [rows].
            wanted: how many candidates of each.
        """
        ids, logits, totals = (self.found.view(name, io.found) for name in _FOUND)
        return Candidates(ids[rows, :wanted], logits[rows, :wanted], totals[rows].reshape(-1))

    def close(self) -> None:
        """Free the graphs."""
        self._runner.close()

    def _launch(self, name: str, io: StepIO, lengths: Ids) -> None:
        if self._form == "static":
            self.given.view(CACHE_LENGTHS, io.given)[:] = lengths
        self._runner.run(name, lambda: self._queue(io, from_host=name == "feed"), self._can_capture)
        io.record(self._device.stream)

    def _queue(self, io: StepIO, *, from_host: bool) -> None:
        cuda, stream, memory = self._device.cuda, self._device.stream, self._device.memory
        given, found = memory[GIVEN], memory[FOUND]
        if from_host:
            cuda.upload(given, io.given[: self.given.num_bytes], stream)
        else:
            cuda.upload(given, io.given[: self.given.pieces[CACHE_LENGTHS].num_bytes], stream)
            tokens, best = self.given.addresses(given)[TARGET_IDS], self.found.addresses(found)[CANDIDATE_IDS]
            cuda.copy_2d(tokens, _ITEM, best, _ITEM * self.sizes.num_candidates, self.sizes.rows, stream)
        self._context.run(stream)
        cuda.download(io.found[: self.found.num_bytes], found, stream)

    def _bind(self) -> None:
        memory, dims = self._device.memory, self.sizes.dims(self._past_len)
        graph = decoder_graph(self._device.engines.spec, self._form)
        packed = self.given.addresses(memory[GIVEN]) | self.found.addresses(memory[FOUND])
        addresses = packed | {NUM_CANDIDATES: self._num_candidates.ctypes.data}
        for tensor in (*graph.inputs, *graph.outputs):
            if tensor.name not in addresses:
                # One buffer is past and present of the static form, which writes in place.
                name = tensor.name.replace("present_", "past_") if self._form == "static" else tensor.name
                addresses[tensor.name] = memory[name]
        self._context.bind({tensor.name: shape_of(tensor, dims) for tensor in graph.inputs}, addresses)

    def _can_capture(self) -> bool:
        """Decide, behind the first run, who captures."""
        if not self._replays:
            return False
        if self._context.can_be_captured(self._device.stream):
            return True
        self._device.synchronize()
        plan = decoder_plan(self._form, self.sizes.capacity, self._device.engines.limits)
        self._context = self._device.context(plan, use="replay itself")
        self._bind()
        return False
