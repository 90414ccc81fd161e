"""One shape of decoder step: what the host gives it and gets from it, and the step that overlaps the host."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Protocol

import numpy as np

from tfexport.runtime.session import Candidates, Floats, Ids
from tfexport.runtime.trt.engine import Context
from tfexport.runtime.trt.graphs import CudaGraphRunner
from tfexport.runtime.trt.resources import DeviceResources, Pinned, shape_of
from tfexport.spec import (
    CACHE_LENGTHS,
    CANDIDATE_IDS,
    CANDIDATE_LOGITS,
    DECODER,
    LOG_NORMALIZER,
    NUM_CANDIDATES,
    TARGET_IDS,
    Form,
    decoder_graph,
)
from tfexport.trt.config import EngineLimits
from tfexport.trt.cuda import Cuda


class StepIO:
    """What the host gives a step and gets from it: pinned arrays, and the event behind the step.

    From the launch until `wait` returns, the arrays belong to the device.

    Attributes:
        target_ids: int64, flat [rows · target_len].
        cache_lengths: int64 [max rows].
        token_ids: int64, flat [rows · num_candidates].
        logits: float32, flat like token_ids.
        log_normalizer: float32 [max rows].
    """

    def __init__(self, cuda: Cuda, event: int, pinned: Pinned, limits: EngineLimits) -> None:
        """Make room for the largest step that the engines take."""
        rows = limits.max_batch
        self.target_ids: Ids = pinned.array(rows * limits.max_target_length, np.int64)
        self.cache_lengths: Ids = pinned.array(rows, np.int64)
        self.token_ids: Ids = pinned.array(rows * limits.max_candidates, np.int64)
        self.logits: Floats = pinned.array(rows * limits.max_candidates, np.float32)
        self.log_normalizer: Floats = pinned.array(rows, np.float32)
        self._cuda, self._event = cuda, event

    def record(self, stream: int) -> None:
        """Mark the end of the step that was just queued."""
        self._cuda.record(self._event, stream)

    def wait(self) -> None:
        """Wait for the newest step that used these arrays."""
        self._cuda.wait(self._event)

    def candidates(self, num_rows: int, num_candidates: int, rows: Ids, wanted: int) -> Candidates:
        """Copy out what a step has found.

        Args:
            num_rows: of the step.
            num_candidates: of the step.
            rows: those to copy, int64 [rows].
            wanted: how many candidates of each.
        """
        count = num_rows * num_candidates
        token_ids = self.token_ids[:count].reshape(num_rows, num_candidates)[rows, :wanted]
        logits = self.logits[:count].reshape(num_rows, num_candidates)[rows, :wanted]
        return Candidates(token_ids, logits, self.log_normalizer[rows])


@dataclass(frozen=True)
class Sizes:
    """The dimensions of a step: slots and rows on the device, not those that are read."""

    batch: int
    rows: int
    source_len: int
    target_len: int
    num_candidates: int

    def dims(self, form: Form, past_len: int, capacity: int) -> dict[str, int]:
        """Return every named dimension of the decoder's contract."""
        length = {"past_len": past_len, "past_len + target_len": past_len + self.target_len}
        return {**asdict(self), **(length if form == "concat" else {"capacity": capacity})}


class Step:
    """A step of one shape in one replica.

    `feed` takes the tokens from the host, `follow` takes those that the step
    before has chosen, without leaving the device. Both queue everything, the
    results included, and return at once. A step that comes again is a CUDA graph
    from its second time on. Where the library cannot be captured
    from outside it is asked to capture by itself; never both.

    Attributes:
        sizes: of this step.
        capacity: positions that the cache has.
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
        self.sizes, self.capacity = sizes, device.engines.limits.max_target_length
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
        io.target_ids[: target_ids.size] = target_ids
        self._launch("feed", io, lengths)

    def follow(self, io: StepIO, lengths: Ids, number: int) -> None:
        """Queue the step on the tokens that the newest step found best; both take one token and give one.

        Args:
            io: not in use; in use until its `wait` returns.
            lengths: tokens in the cache of every row, those of the newest step included, int64 [rows].
            number: of the step I/O; each has a graph of its own.
        """
        self._launch(f"follow {number}", io, lengths)

    def close(self) -> None:
        """Free the graphs."""
        self._runner.close()

    def _launch(self, name: str, io: StepIO, lengths: Ids) -> None:
        io.cache_lengths[: self.sizes.rows] = lengths
        self._runner.run(name, lambda: self._queue(io, from_host=name == "feed"), self._can_capture)
        io.record(self._device.stream)

    def _queue(self, io: StepIO, *, from_host: bool) -> None:
        cuda, stream, memory, rows = self._device.cuda, self._device.stream, self._device.memory, self.sizes.rows
        if from_host:
            cuda.upload(memory[TARGET_IDS], io.target_ids[: rows * self.sizes.target_len], stream)
        else:
            cuda.copy(memory[TARGET_IDS], memory[CANDIDATE_IDS], rows * io.target_ids.itemsize, stream)
        if self._device.engines.form == "static":
            cuda.upload(memory[CACHE_LENGTHS], io.cache_lengths[:rows], stream)
        self._context.run(stream)
        count = rows * self.sizes.num_candidates
        cuda.download(io.token_ids[:count], memory[CANDIDATE_IDS], stream)
        cuda.download(io.logits[:count], memory[CANDIDATE_LOGITS], stream)
        cuda.download(io.log_normalizer[:rows], memory[LOG_NORMALIZER], stream)

    def _bind(self) -> None:
        form = self._device.engines.form
        assert form is not None
        graph = decoder_graph(self._device.engines.spec, form)
        dims = self.sizes.dims(form, self._past_len, self.capacity)
        shapes = {tensor.name: shape_of(tensor, dims) for tensor in graph.inputs}
        addresses = {NUM_CANDIDATES: self._num_candidates.ctypes.data}
        for tensor in (*graph.inputs, *graph.outputs):
            if tensor.name != NUM_CANDIDATES:
                # One buffer is past and present of the static form, which writes in place.
                name = tensor.name.replace("present_", "past_") if form == "static" else tensor.name
                addresses[tensor.name] = self._device.memory[name]
        self._context.bind(shapes, addresses)

    def _can_capture(self) -> bool:
        """Decide, behind the first run, who captures."""
        if not self._replays:
            return False
        if self._context.can_be_captured(self._device.stream):
            return True
        self._device.synchronize()
        self._context = self._device.context(DECODER["static"], use="replay itself")
        self._bind()
        return False


class GreedyStep(Protocol):
    """What overlapping needs of a step that takes one token a row and gives the best one."""

    capacity: int

    def feed(self, io: StepIO, target_ids: Ids, lengths: Ids) -> None:
        """Queue the step on tokens of the host."""
        ...

    def follow(self, io: StepIO, lengths: Ids, number: int) -> None:
        """Queue the step on the tokens that the newest step found best."""
        ...


class OverlappedStep:
    """Queues the next greedy step before the host has seen the tokens of this one.

    Greedy search nearly always goes on with the best token, which lies on the
    device already. So each call queues two steps, this one and the one after it,
    and waits for this one alone; while the host decides what is finished, the
    device computes. The next call finds its step under way, and checks that the
    host wants the tokens that the device went on with. If not, the step is
    dropped: its tokens were written behind the end of the cache, where the step
    that replaces it writes over them.

    Two step I/Os take turns. One is written by the host only after the step that
    used it was waited for.
    """

    def __init__(self, ios: tuple[StepIO, StepIO]) -> None:
        """Take the step I/Os of a replica, which nothing else uses while a step is under way."""
        self._ios = ios
        self._step: GreedyStep | None = None  # the one under way, in io _number, behind _lengths tokens
        self._number = 0
        self._lengths: Ids = np.empty(0, np.int64)
        self._chosen: Ids = self._lengths  # best token of every row of the step before it

    def run(self, step: GreedyStep, target_ids: Ids, read: Ids, lengths: Ids) -> StepIO:
        """Run a greedy step and begin the next.

        Args:
            step: of any shape; one of another shape than last time is fed by the host.
            target_ids: int64 [rows], those of `read` matter.
            read: rows that the host reads, int64.
            lengths: tokens in the cache of every row, int64 [rows]; 0 where nobody reads.

        Returns:
            The step I/O with the results, valid until the next call.
        """
        if not self._is_under_way(step, target_ids, read, lengths):
            self.drop()
            self._number = 0
            step.feed(self._ios[0], target_ids, lengths)
        io, other = self._ios[self._number], 1 - self._number
        self._step = None
        following = np.zeros_like(lengths)  # rows that nobody reads stay at 0
        following[read] = lengths[read] + 1
        if following.max() < step.capacity:
            step.follow(self._ios[other], following, other)
            self._step, self._number, self._lengths = step, other, following
        io.wait()
        self._chosen = io.token_ids[: target_ids.size].copy()
        return io

    def drop(self) -> None:
        """Wait for the step under way, if there is one, and forget it: both step I/Os are free afterwards."""
        if self._step is not None:
            self._ios[self._number].wait()
            self._step = None

    def _is_under_way(self, step: GreedyStep, target_ids: Ids, read: Ids, lengths: Ids) -> bool:
        if self._step is not step:
            return False
        return bool((target_ids[read] == self._chosen[read]).all() and (lengths[read] == self._lengths[read]).all())
