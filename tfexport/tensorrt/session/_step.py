"""Run decode steps of one shape, and overlap them with the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np

from tfexport.contract import (
    CACHE_LENGTHS,
    CANDIDATE_IDS,
    CANDIDATE_LOGITS,
    LOG_NORMALIZER,
    LOGITS,
    NUM_CANDIDATES,
    TARGET_IDS,
    ModelSpec,
    Variant,
    decoder_graph,
)
from tfexport.precision import ITEM_BYTES
from tfexport.runtime.session import Candidates, Ids
from tfexport.tensorrt.config import EngineLimits
from tfexport.tensorrt.session._engine import Context, CudaGraphRunner
from tfexport.tensorrt.session._resources import Bytes, DeviceResources, offsets, packed, part, shape_of

# Device buffers for the inputs from the host and the outputs to the host.
INPUTS, OUTPUTS = "step inputs", "step outputs"
# An unused early step costs a whole step; not starting one costs the host's time between two steps.
SURE_AFTER = 8

_INPUTS = (CACHE_LENGTHS, TARGET_IDS)
_OUTPUTS = (CANDIDATE_IDS, CANDIDATE_LOGITS, LOG_NORMALIZER)
_ITEM = np.dtype(np.int64).itemsize


class StepIO:
    """Pinned buffers of a step; the device owns them from the launch until `wait`."""

    def __init__(self, device: DeviceResources, inputs: int, outputs: int) -> None:
        self.inputs: Bytes = device.pinned(inputs, np.uint8)
        self.outputs: Bytes = device.pinned(outputs, np.uint8)
        self._cuda, self._event = device.cuda, device.event()

    def record(self, stream: int) -> None:
        self._cuda.record(self._event, stream)

    def wait(self) -> None:
        self._cuda.wait(self._event)


@dataclass(frozen=True)
class Sizes:
    """Dimensions of a step; slots and rows include unused ones."""

    batch: int
    rows: int
    source_len: int
    target_len: int
    num_candidates: int
    capacity: int

    def dims(self, past_len: int) -> dict[str, int]:
        """Return every named dimension of the decoder's contract."""
        return {**asdict(self), "past_len": past_len, "past_len + target_len": past_len + self.target_len}

    def packed(self, spec: ModelSpec, variant: Variant) -> tuple[np.dtype[np.void], np.dtype[np.void]]:
        """Return the layouts of the host's inputs, lengths first, and of the outputs."""
        graph, dims = decoder_graph(spec, variant), self.dims(0)
        tensors = {tensor.name: tensor for tensor in (*graph.inputs, *graph.outputs)}
        inputs, outputs = ([tensors[name] for name in names if name in tensors] for names in (_INPUTS, _OUTPUTS))
        return packed(inputs, dims), packed(outputs, dims)


def buffer_bytes(limits: EngineLimits, spec: ModelSpec, variant: Variant) -> dict[str, int]:
    rows, length = limits.max_batch, limits.max_target_length
    largest = Sizes(rows, rows, limits.max_source_length, length, limits.max_candidates, length)
    inputs, outputs = largest.packed(spec, variant)
    return {INPUTS: inputs.itemsize, OUTPUTS: outputs.itemsize, LOGITS: rows * spec.vocab * ITEM_BYTES["float32"]}


class Step:
    """A step of one shape in one replica.

    Both `feed` and `follow` queue all work, including copies of the results, and return at once. A step that repeats
    becomes a CUDA graph at its second run; if that cannot be captured, the library captures its own.
    """

    def __init__(
        self, device: DeviceResources, sizes: Sizes, context: Context, past_len: int = 0, *, replays: bool = False
    ) -> None:
        """Bind a context; `replays` states whether the step repeats at equal addresses."""
        variant = device.engines.variant
        assert variant is not None
        self.sizes, self._variant = sizes, variant
        self.inputs, self.outputs = sizes.packed(device.engines.spec, variant)
        self._device, self._past_len, self._replays = device, past_len, replays
        self._runner = CudaGraphRunner(context, device.cuda, device.stream, device.engines.capture_failed)
        # Shapes depend on it, so the library reads it on the host at every run.
        self._num_candidates = np.array([sizes.num_candidates], np.int64)
        self._bind()

    def feed(self, io: StepIO, target_ids: Ids, lengths: Ids) -> None:
        """Queue the step on tokens of the host; `lengths` are those in the caches, [rows]."""
        part(io.inputs, self.inputs, TARGET_IDS)[:] = target_ids.reshape(self.sizes.rows, self.sizes.target_len)
        self._launch("feed", io, lengths)

    def follow(self, io: StepIO, lengths: Ids, number: int) -> None:
        """Queue the step on the newest step's best tokens, which `lengths` include."""
        self._launch(f"follow {number}", io, lengths)

    def best(self, io: StepIO) -> Ids:
        """Return a copy of the best token of every row, int64 [rows]."""
        best: Ids = part(io.outputs, self.outputs, CANDIDATE_IDS)[:, 0].copy()
        return best

    def candidates(self, io: StepIO, rows: Ids, wanted: int) -> Candidates:
        """Return copies of `wanted` candidates of rows, int64 [rows], after `io.wait`."""
        ids, logits, totals = (part(io.outputs, self.outputs, name) for name in _OUTPUTS)
        return Candidates(ids[rows, :wanted], logits[rows, :wanted], totals[rows].reshape(-1))

    def close(self) -> None:
        self._runner.close()

    def _launch(self, name: str, io: StepIO, lengths: Ids) -> None:
        if not self._device.engines.concatenates:
            part(io.inputs, self.inputs, CACHE_LENGTHS)[:] = lengths
        self._runner.run(name, lambda: self._queue(io, from_host=name == "feed"), self._can_capture)
        io.record(self._device.stream)

    def _queue(self, io: StepIO, *, from_host: bool) -> None:
        cuda, stream, memory = self._device.cuda, self._device.stream, self._device.memory
        inputs, outputs = memory[INPUTS], memory[OUTPUTS]
        if from_host:
            cuda.upload(inputs, io.inputs[: self.inputs.itemsize], stream)
        else:
            cuda.upload(inputs, io.inputs[: self.inputs[CACHE_LENGTHS].itemsize], stream)
            tokens, best = inputs + offsets(self.inputs)[TARGET_IDS], outputs + offsets(self.outputs)[CANDIDATE_IDS]
            cuda.copy_2d(tokens, _ITEM, best, _ITEM * self.sizes.num_candidates, self.sizes.rows, stream)
        self._runner.context.run(stream)
        cuda.download(io.outputs[: self.outputs.itemsize], outputs, stream)

    def _bind(self) -> None:
        memory, dims = self._device.memory, self.sizes.dims(self._past_len)
        graph = decoder_graph(self._device.engines.spec, self._variant)
        addresses = {NUM_CANDIDATES: self._num_candidates.ctypes.data}
        for buffer, layout in ((INPUTS, self.inputs), (OUTPUTS, self.outputs)):
            addresses |= {name: memory[buffer] + offset for name, offset in offsets(layout).items()}
        for tensor in (*graph.inputs, *graph.outputs):
            if tensor.name not in addresses:
                # Caches that are updated in place share a buffer.
                in_place = self._device.engines.updates_in_place
                addresses[tensor.name] = memory[tensor.name.replace("present_", "past_") if in_place else tensor.name]
        self._runner.context.bind({tensor.name: shape_of(tensor, dims) for tensor in graph.inputs}, addresses)

    def _can_capture(self) -> bool:
        if not self._replays:
            return False
        if self._runner.context.can_be_captured(self._device.stream):
            return True
        self._device.synchronize()
        self._runner.context = self._device.context(self._runner.context.name, use="replay itself")
        self._bind()
        return False


class OverlappedStep:
    """Queues the next step before the host has read the tokens of this one.

    Greedy search nearly always continues with the best token, which is already on the device. The next call checks
    that the host chose it. If not, the early step is dropped, and its replacement overwrites its cache entries. A
    caller that requests several candidates may choose others, so it must have used the best for `SURE_AFTER` steps.

    Two step I/Os take turns. The host writes into one only after it has waited for the step that used it.
    """

    def __init__(self, ios: tuple[StepIO, StepIO]) -> None:
        self._ios = ios
        self._step: Step | None = None  # started early, in I/O _number, on rows of _lengths tokens
        self._number = 0
        self._lengths: Ids = np.empty(0, np.int64)
        self._chosen: Ids = self._lengths  # best token of every row in the step before it
        self._num_used = 0  # consecutive steps whose best tokens were used

    def run(self, step: Step, target_ids: Ids, read: Ids, lengths: Ids, get_following: Callable[[], Step]) -> StepIO:
        """Run a step of one token per row; start the next one if it will likely be used.

        The host reads only the rows `read`; `lengths` are 0 in all others. `get_following` is called once, when the
        step is queued. The result is valid until the next call.
        """
        if not self._is_started(step, target_ids, read, lengths):
            self._wait()
            self._number = 0
            step.feed(self._ios[0], target_ids, lengths)
        io, other = self._ios[self._number], 1 - self._number
        self._step, next_step = None, get_following()
        following = np.zeros_like(lengths)  # rows that are not read stay at 0
        following[read] = lengths[read] + 1
        is_sure = step.sizes.num_candidates == 1 or self._num_used >= SURE_AFTER
        if is_sure and following.max() < step.sizes.capacity:
            next_step.follow(self._ios[other], following, other)
            self._step, self._number, self._lengths = next_step, other, following
        io.wait()
        self._chosen = step.best(io)
        return io

    def drop(self) -> None:
        """Wait for a step that was started early and drop its tokens."""
        self._wait()
        self._num_used, self._chosen = 0, np.empty(0, np.int64)

    def _wait(self) -> None:
        if self._step is not None:
            self._ios[self._number].wait()
            self._step = None

    def _is_started(self, step: Step, target_ids: Ids, read: Ids, lengths: Ids) -> bool:
        is_used = self._chosen.size == target_ids.size and bool((target_ids[read] == self._chosen[read]).all())
        self._num_used = self._num_used + 1 if is_used else 0
        return is_used and self._step is step and bool((lengths[read] == self._lengths[read]).all())
