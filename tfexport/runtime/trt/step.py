"""One shape of decoder step: an execution context bound to a unit's buffers, and the copies before and behind it."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from tfexport.runtime.session import Ids
from tfexport.runtime.trt.engine import Context
from tfexport.runtime.trt.memory import Slot, shape_of
from tfexport.runtime.trt.replay import Replay
from tfexport.runtime.trt.workspace import Workspace
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


@dataclass(frozen=True)
class Sizes:
    """The dimensions of a step: lanes and rows on the device, not those that are read."""

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
    """A step of one shape in one unit.

    `feed` takes the tokens from the host, `follow` takes those that the step
    before has chosen, without leaving the device. Both queue everything, the
    results included, and return at once. In the static form a step of one token
    is a CUDA graph from its second time on. Where the library cannot be captured
    from outside it is asked to capture by itself; never both.

    Attributes:
        sizes: of this step.
        capacity: positions that the cache has.
    """

    def __init__(self, work: Workspace, sizes: Sizes, context: Context, past_len: int = 0) -> None:
        """Give a context all its shapes and addresses.

        Args:
            work: with buffers that are large enough.
            sizes: of the step.
            context: of the decoder, in the profile for these sizes.
            past_len: tokens in the cache; the static form does not ask for it here.

        Raises:
            BackendError: the engine refuses a shape.
        """
        self.sizes, self.capacity = sizes, work.engines.limits.max_target_length
        self._work, self._context, self._past_len = work, context, past_len
        self._replay = Replay(work.cuda, work.stream)
        # Shapes depend on it, so the library reads it on the host, whenever it is given a run.
        self._num_candidates = np.array([sizes.num_candidates], np.int64)
        self._bind()

    def feed(self, slot: Slot, target_ids: Ids, past_len: int) -> None:
        """Queue the step on tokens of the host.

        Args:
            slot: not in use; in use until its `wait` returns.
            target_ids: int64 [rows, target_len].
            past_len: tokens in the cache of every row.
        """
        slot.target_ids[: target_ids.size] = target_ids.ravel()
        self._launch("feed", slot, past_len)

    def follow(self, slot: Slot, past_len: int, number: int) -> None:
        """Queue the step on the tokens that the newest step found best; both take one token and give one.

        Args:
            slot: not in use; in use until its `wait` returns.
            past_len: tokens in the cache of every row, that of the newest step included.
            number: of the slot; each has a graph of its own.
        """
        self._launch(f"follow {number}", slot, past_len)

    def _launch(self, name: str, slot: Slot, past_len: int) -> None:
        slot.cache_lengths[: self.sizes.rows] = past_len
        self._replay.run(name, lambda: self._queue(slot, from_host=name == "feed"), self._can_capture)
        slot.record(self._work.stream)

    def _queue(self, slot: Slot, *, from_host: bool) -> None:
        cuda, stream, memory, rows = self._work.cuda, self._work.stream, self._work.memory, self.sizes.rows
        if from_host:
            cuda.upload(memory[TARGET_IDS], slot.target_ids[: rows * self.sizes.target_len], stream)
        else:
            cuda.copy(memory[TARGET_IDS], memory[CANDIDATE_IDS], rows * slot.target_ids.itemsize, stream)
        if self._work.engines.form == "static":
            cuda.upload(memory[CACHE_LENGTHS], slot.cache_lengths[:rows], stream)
        self._context.run(stream)
        count = rows * self.sizes.num_candidates
        cuda.download(slot.token_ids[:count], memory[CANDIDATE_IDS], stream)
        cuda.download(slot.logits[:count], memory[CANDIDATE_LOGITS], stream)
        cuda.download(slot.log_normalizer[:rows], memory[LOG_NORMALIZER], stream)

    def close(self) -> None:
        """Free the graphs."""
        self._replay.close()

    def _bind(self) -> None:
        form = self._work.engines.form
        assert form is not None
        graph = decoder_graph(self._work.engines.spec, form)
        dims = self.sizes.dims(form, self._past_len, self.capacity)
        shapes = {tensor.name: shape_of(tensor, dims) for tensor in graph.inputs}
        addresses = {NUM_CANDIDATES: self._num_candidates.ctypes.data}
        for tensor in (*graph.inputs, *graph.outputs):
            if tensor.name != NUM_CANDIDATES:
                # One buffer is past and present of the static form, which writes in place.
                name = tensor.name.replace("present_", "past_") if form == "static" else tensor.name
                addresses[tensor.name] = self._work.memory[name]
        self._context.bind(shapes, addresses)

    def _can_capture(self) -> bool:
        """Decide, behind the first run, who captures."""
        engines = self._work.engines
        if engines.form != "static" or self.sizes.target_len > 1:
            return False
        if self._context.can_be_captured(self._work.stream):
            return True
        self._work.synchronize()
        self._context = self._work.context(DECODER[engines.form], use="replay itself")
        self._bind()
        return False
