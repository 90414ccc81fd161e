"""ONNX Runtime as a backend: IO binding, the caches in the device's memory, every step bound to them.

CUDA graphs (the provider option `enable_cuda_graph`) are not used, though every operator of the static form has a
kernel that a graph can hold. A captured graph belongs to the thread that captured it, while threads share a session;
the capture is global, so no other thread may use CUDA meanwhile; and it is bound to shapes and addresses, while here
the rows, the source and the capacity change as texts end, and graphs are never freed before onnxruntime 1.27
(onnxruntime/core/providers/cuda/cuda_graph.cc). The trt session has a graph for each bucket of shapes instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnxruntime as ort

from tfexport.errors import BackendError
from tfexport.runtime.ort.cache import OrtCache, make_cache
from tfexport.runtime.ort.device import STEP_SPIN_US, OrtDevice, host_value, run, still_open
from tfexport.runtime.session import Candidates, Floats, Ids, Mask, check_rows, check_source, check_target
from tfexport.spec import (
    CACHE_LENGTHS,
    CANDIDATE_IDS,
    CANDIDATE_LOGITS,
    DECODER,
    ENCODER,
    FLOAT,
    HIDDEN_STATES,
    LOG_NORMALIZER,
    NUM_CANDIDATES,
    SOURCE_IDS,
    SOURCE_MASK,
    TARGET_IDS,
    Accuracy,
    Device,
    Form,
    ModelSpec,
    WeightType,
    key_value_names,
)


@dataclass
class OrtState:
    """One batch being decoded.

    Attributes:
        batch: sources still being decoded.
        rows: hypotheses, a multiple of batch.
        past_len: tokens in the cache of every row.
        source_mask: on the host.
        cross: keys and values of the source, by layer, on the device.
        cache: keys and values of the target, on the device.
        binding: what the next step is bound to; None when it must be bound anew.
    """

    batch: int
    rows: int
    past_len: int
    source_mask: Mask
    cross: list[ort.OrtValue]
    cache: OrtCache
    binding: _Binding | None = field(default=None, repr=False)


@dataclass
class _Binding:
    """Buffers that a step reads and writes, bound once for many steps of equal shape.

    All lie on the device but num_candidates: shapes are read on the host.
    """

    io: ort.IOBinding
    num_candidates: ort.OrtValue
    target_ids: ort.OrtValue
    cache_lengths: ort.OrtValue
    token_ids: ort.OrtValue
    logits: ort.OrtValue
    log_normalizer: ort.OrtValue

    def fits(self, target_ids: Ids, num_candidates: int) -> bool:
        return tuple(self.target_ids.shape()) == target_ids.shape and self.token_ids.shape()[1] == num_candidates


class OrtSession:
    """An exported model in ONNX Runtime.

    Attributes:
        spec: sizes, limits and token ids.
        backend: "ort".
        form: of the decoder that runs; None for an encoder alone.
    """

    backend = "ort"
    max_rows: int | None = None
    max_candidates: int | None = None

    def __init__(
        self,
        graphs: Mapping[str, Path],
        spec: ModelSpec,
        form: Form | None,
        threads: int | None = None,
        device: Device = "cpu",
        *,
        weights: WeightType | None = None,
        host_caches: bool | None = None,
    ) -> None:
        """Load the graphs.

        Args:
            graphs: path of each graph by its name in the contract.
            spec: of the model.
            form: of the decoder to use; None for an encoder alone.
            threads: for one call on the CPU; None means one for each core.
            device: where the graphs run and the caches lie.
            weights: their type where it is narrower than that of the graphs.
            host_caches: whether numpy keeps the caches of the static form, which
                saves copies; None means on the CPU. False there runs what a GPU runs.

        Raises:
            BackendError: ONNX Runtime cannot use the device, run the precision or load a graph.
        """
        if spec.precision == "bf16" and device == "cpu":
            raise BackendError(
                "ort: ONNX Runtime has no bfloat16 kernels on the CPU; use --device cuda or --backend eager, "
                "or export with fp32 or fp16"
            )
        self.spec, self.form = spec, form
        self.accuracy: Accuracy = weights or spec.precision
        self._device = OrtDevice(device, FLOAT[spec.precision], 0 if form is None else 2 * spec.layers)
        self._host_caches = device == "cpu" if host_caches is None else host_caches
        self._encoder: ort.InferenceSession | None = self._load(graphs, ENCODER, threads)
        self._decoder = None if form is None else self._load(graphs, DECODER[form], threads, spin_us=STEP_SPIN_US)

    def encode(self, source_ids: Ids, source_mask: Mask) -> OrtState:
        """Encode a batch and make room for one row a source; see `Session.encode`."""
        if self.form is None:
            raise BackendError("ort: this bundle is an encoder alone and cannot generate; use embed")
        check_source(self.spec, source_ids, source_mask)
        cross = self._run_encoder(source_ids, source_mask, key_value_names("cross", self.spec.layers))
        batch = source_ids.shape[0]
        cache = make_cache(self.form, self.spec, self._device, batch, on_host=self._host_caches)
        return OrtState(batch, batch, 0, source_mask.copy(), cross, cache)

    def step(self, state: OrtState, target_ids: Ids, num_candidates: int) -> Candidates:
        """Run the decoder on the newest tokens; see `Session.step`."""
        check_target(self.spec, state, target_ids, num_candidates)
        moved = state.cache.reserve(state.past_len + target_ids.shape[1])
        bound = state.binding
        if bound is None or moved or not bound.fits(target_ids, num_candidates):
            bound = self._bind(state, target_ids.shape[1], num_candidates)
        bound.target_ids.update_inplace(np.ascontiguousarray(target_ids))
        bound.cache_lengths.update_inplace(np.full(state.rows, state.past_len, np.int64))
        run(still_open(self._decoder), bound.io)
        state.past_len += target_ids.shape[1]
        state.binding = None if state.cache.advance(bound.io) else bound
        # On the CPU numpy() is a view of a buffer that the next step writes.
        return Candidates(
            bound.token_ids.numpy().copy(), bound.logits.numpy().copy(), bound.log_normalizer.numpy()[:, 0].copy()
        )

    def reorder(self, state: OrtState, rows: Ids) -> None:
        """Let row r continue what row rows[r] was; see `Session.reorder`."""
        kept = check_rows(state, rows)
        if np.array_equal(rows, np.arange(state.rows)):
            return
        if kept.size != state.batch or (np.diff(kept) < 0).any():
            state.source_mask = state.source_mask[kept]
            state.cross = self._device.take(state.cross, kept)
            state.binding = None
        if state.cache.reorder(rows, state.past_len):
            state.binding = None
        state.batch, state.rows = kept.size, rows.size

    def hidden_states(self, source_ids: Ids, source_mask: Mask) -> Floats:
        """Encode a batch with an encoder alone; see `Session.hidden_states`."""
        if self.form is not None:
            raise BackendError("ort: this bundle has a decoder and gives no hidden states; use generate")
        check_source(self.spec, source_ids, source_mask)
        hidden: Floats = self._run_encoder(source_ids, source_mask, [HIDDEN_STATES])[0].numpy()
        return hidden

    def close(self) -> None:
        """Free the graphs; the session cannot be used afterwards."""
        self._encoder = self._decoder = None

    def _load(
        self, graphs: Mapping[str, Path], name: str, threads: int | None, *, spin_us: int = 0
    ) -> ort.InferenceSession:
        return self._device.load(graphs[name], graphs[name].name, threads, spin_us=spin_us)

    def _run_encoder(self, source_ids: Ids, source_mask: Mask, outputs: list[str]) -> list[ort.OrtValue]:
        encoder = still_open(self._encoder)
        io = encoder.io_binding()
        for name, array in ((SOURCE_IDS, source_ids), (SOURCE_MASK, source_mask)):
            io.bind_ortvalue_input(name, self._device.upload(array))
        for name in outputs:
            self._device.bind_output(io, name)
        run(encoder, io)
        return list(io.get_outputs())

    def _bind(self, state: OrtState, target_len: int, num_candidates: int) -> _Binding:
        device, rows = self._device, state.rows
        bound = _Binding(
            still_open(self._decoder).io_binding(),
            num_candidates=host_value(np.array([num_candidates])),
            target_ids=device.empty((rows, target_len), "int64"),
            cache_lengths=device.empty((rows,), "int64"),
            token_ids=device.empty((rows, num_candidates), "int64"),
            logits=device.empty((rows, num_candidates), "float32"),
            log_normalizer=device.empty((rows, 1), "float32"),
        )
        # An input that lies elsewhere than the graph reads it is copied when it is bound, and not again: what a step
        # changes lies where it is read.
        inputs = {
            TARGET_IDS: bound.target_ids,
            SOURCE_MASK: device.upload(state.source_mask),
            NUM_CANDIDATES: bound.num_candidates,
            **dict(zip(key_value_names("cross", self.spec.layers), state.cross, strict=True)),
        }
        if self.form == "static":
            inputs[CACHE_LENGTHS] = bound.cache_lengths
        for name, value in inputs.items():
            bound.io.bind_ortvalue_input(name, value)
        outputs = {
            CANDIDATE_IDS: bound.token_ids,
            CANDIDATE_LOGITS: bound.logits,
            LOG_NORMALIZER: bound.log_normalizer,
        }
        for name, value in outputs.items():
            bound.io.bind_ortvalue_output(name, value)
        state.cache.bind(bound.io)
        return bound
