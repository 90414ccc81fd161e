"""One shape of decoder step: an execution context bound to a replica's buffers, and the copies before and behind it."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from tfexport.runtime.session import Ids
from tfexport.runtime.trt.engine import Context
from tfexport.runtime.trt.graphs import CudaGraphRunner
from tfexport.runtime.trt.resources import StepIO, shape_of
from tfexport.runtime.trt.workspace import DeviceResources
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
    """A step of one shape in one replica.

    `feed` takes the tokens from the host, `follow` takes those that the step
    before has chosen, without leaving the device. Both queue everything, the
    results included, and return at once. In the static form a step of one token
    is a CUDA graph from its second time on. Where the library cannot be captured
    from outside it is asked to capture by itself; never both.

    Attributes:
        sizes: of this step.
        capacity: positions that the cache has.
    """

    def __init__(self, device: DeviceResources, sizes: Sizes, context: Context, past_len: int = 0) -> None:
        """Give a context all its shapes and addresses.

        Args:
            device: with buffers that are large enough.
            sizes: of the step.
            context: of the decoder, in the profile for these sizes.
            past_len: tokens in the cache; the static form does not ask for it here.

        Raises:
            BackendError: the engine refuses a shape.
        """
        self.sizes, self.capacity = sizes, device.engines.limits.max_target_length
        self._device, self._context, self._past_len = device, context, past_len
        self._replay = CudaGraphRunner(device.cuda, device.stream)
        # Shapes depend on it, so the library reads it on the host, whenever it is given a run.
        self._num_candidates = np.array([sizes.num_candidates], np.int64)
        self._bind()

    def feed(self, io: StepIO, target_ids: Ids, past_len: int) -> None:
        """Queue the step on tokens of the host.

        Args:
            io: not in use; in use until its `wait` returns.
            target_ids: int64 [rows, target_len].
            past_len: tokens in the cache of every row.
        """
        io.target_ids[: target_ids.size] = target_ids.ravel()
        self._launch("feed", io, past_len)

    def follow(self, io: StepIO, past_len: int, number: int) -> None:
        """Queue the step on the tokens that the newest step found best; both take one token and give one.

        Args:
            io: not in use; in use until its `wait` returns.
            past_len: tokens in the cache of every row, that of the newest step included.
            number: of the io; each has a graph of its own.
        """
        self._launch(f"follow {number}", io, past_len)

    def _launch(self, name: str, io: StepIO, past_len: int) -> None:
        io.cache_lengths[: self.sizes.rows] = past_len
        self._replay.run(name, lambda: self._queue(io, from_host=name == "feed"), self._can_capture)
        io.record(self._device.stream)

    def _queue(self, io: StepIO, *, from_host: bool) -> None:
        cuda, stream, memory, rows = (
            self._device.cuda,
            self._device.stream,
            self._device.memory,
            self.sizes.rows,
        )
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

    def close(self) -> None:
        """Free the graphs."""
        self._replay.close()

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
        engines = self._device.engines
        if engines.form != "static" or self.sizes.target_len > 1:
            return False
        if self._context.can_be_captured(self._device.stream):
            return True
        self._device.synchronize()
        self._context = self._device.context(DECODER[engines.form], use="replay itself")
        self._bind()
        return False
