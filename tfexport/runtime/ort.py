"""ONNX Runtime as a backend, on the CPU: IO binding, the cache in buffers that every step is bound to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from tfexport.config import Form
from tfexport.errors import BackendError
from tfexport.runtime.ort_cache import OrtCache, make_cache, ort_value
from tfexport.runtime.session import Candidates, Floats, Ids, Mask, check_rows, check_source, check_target
from tfexport.spec import (
    CACHE_LENGTHS,
    CANDIDATE_IDS,
    CANDIDATE_LOGITS,
    DECODER,
    ENCODER,
    HIDDEN_STATES,
    LOG_NORMALIZER,
    NUM_CANDIDATES,
    SOURCE_IDS,
    SOURCE_MASK,
    TARGET_IDS,
    ModelSpec,
    key_value_names,
)


@dataclass
class OrtState:
    """One batch being decoded.

    Attributes:
        batch: sources still being decoded.
        rows: hypotheses, a multiple of batch.
        past_len: tokens in the cache of every row.
        source_mask: bool [batch, source_len].
        cross: keys and values of the source, by input name.
        cache: keys and values of the target.
        binding: what the next step is bound to; None when it must be bound anew.
    """

    batch: int
    rows: int
    past_len: int
    source_mask: Mask
    cross: dict[str, ort.OrtValue]
    cache: OrtCache
    binding: _Binding | None = field(default=None, repr=False)


@dataclass
class _Binding:
    """Buffers that a step reads and writes, bound once for many steps of equal shape.

    It keeps every array alive that the runtime only points to.
    """

    io: ort.IOBinding
    source_mask: Mask
    num_candidates: Ids
    target_ids: Ids
    cache_lengths: Ids
    token_ids: Ids
    logits: Floats
    log_normalizer: Floats

    def fits(self, target_ids: Ids, num_candidates: int) -> bool:
        return self.target_ids.shape == target_ids.shape and self.token_ids.shape[1] == num_candidates


class OrtSession:
    """An exported model in ONNX Runtime.

    Attributes:
        spec: sizes, limits and token ids.
        backend: "ort".
        form: of the decoder that runs; None for an encoder alone.
    """

    backend = "ort"

    def __init__(
        self, graphs: Mapping[str, Path], spec: ModelSpec, form: Form | None, threads: int | None = None
    ) -> None:
        """Load the graphs.

        Args:
            graphs: path of each graph by its name in the contract.
            spec: of the model.
            form: of the decoder to use; None for an encoder alone.
            threads: for one call; None means one for each core.

        Raises:
            BackendError: ONNX Runtime cannot run the precision or load a graph.
        """
        if spec.precision == "bf16":
            raise BackendError(
                "ort: ONNX Runtime has no bfloat16 kernels on the CPU; use --backend eager, or export with fp32 or fp16"
            )
        self.spec, self.form = spec, form
        self._encoder: ort.InferenceSession | None = _load(graphs[ENCODER], threads)
        self._decoder = None if form is None else _load(graphs[DECODER[form]], threads)

    def encode(self, source_ids: Ids, source_mask: Mask) -> OrtState:
        """Encode a batch and make room for one row a source; see `Session.encode`."""
        if self.form is None:
            raise BackendError("ort: this bundle is an encoder alone and cannot generate; use embed")
        check_source(self.spec, source_ids, source_mask)
        names = key_value_names("cross", self.spec.layers)
        cross = dict(zip(names, self._run_encoder(source_ids, source_mask, names), strict=True))
        batch = source_ids.shape[0]
        return OrtState(batch, batch, 0, source_mask.copy(), cross, make_cache(self.form, self.spec, batch))

    def step(self, state: OrtState, target_ids: Ids, num_candidates: int) -> Candidates:
        """Run the decoder on the newest tokens; see `Session.step`."""
        check_target(self.spec, state, target_ids, num_candidates)
        moved = state.cache.reserve(state.past_len + target_ids.shape[1])
        bound = state.binding
        if bound is None or moved or not bound.fits(target_ids, num_candidates):
            bound = self._bind(state, target_ids.shape[1], num_candidates)
        bound.target_ids[:] = target_ids
        bound.cache_lengths[:] = state.past_len
        _run(_open(self._decoder), bound.io)
        state.past_len += target_ids.shape[1]
        state.binding = None if state.cache.advance(bound.io) else bound
        return Candidates(bound.token_ids.copy(), bound.logits.copy(), bound.log_normalizer[:, 0].copy())

    def reorder(self, state: OrtState, rows: Ids) -> None:
        """Let row r continue what row rows[r] was; see `Session.reorder`."""
        kept = check_rows(state, rows)
        if np.array_equal(rows, np.arange(state.rows)):
            return
        if kept.size != state.batch or (np.diff(kept) < 0).any():
            state.source_mask = state.source_mask[kept]
            state.cross = {name: ort_value(value.numpy()[kept]) for name, value in state.cross.items()}
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

    def _run_encoder(self, source_ids: Ids, source_mask: Mask, outputs: list[str]) -> list[ort.OrtValue]:
        encoder = _open(self._encoder)
        io = encoder.io_binding()
        inputs = {SOURCE_IDS: ort_value(source_ids), SOURCE_MASK: ort_value(source_mask)}
        for name, value in inputs.items():
            io.bind_ortvalue_input(name, value)
        for name in outputs:
            io.bind_output(name)
        _run(encoder, io)
        return list(io.get_outputs())

    def _bind(self, state: OrtState, target_len: int, num_candidates: int) -> _Binding:
        rows = state.rows
        bound = _Binding(
            _open(self._decoder).io_binding(),
            source_mask=state.source_mask,
            num_candidates=np.array([num_candidates], np.int64),
            target_ids=np.empty((rows, target_len), np.int64),
            cache_lengths=np.empty(rows, np.int64),
            token_ids=np.empty((rows, num_candidates), np.int64),
            logits=np.empty((rows, num_candidates), np.float32),
            log_normalizer=np.empty((rows, 1), np.float32),
        )
        inputs: dict[str, NDArray[Any]] = {
            TARGET_IDS: bound.target_ids,
            SOURCE_MASK: bound.source_mask,
            NUM_CANDIDATES: bound.num_candidates,
        }
        if self.form == "static":
            inputs[CACHE_LENGTHS] = bound.cache_lengths
        for name, array in inputs.items():
            bound.io.bind_ortvalue_input(name, ort_value(array))
        for name, value in state.cross.items():
            bound.io.bind_ortvalue_input(name, value)
        outputs: dict[str, NDArray[Any]] = {
            CANDIDATE_IDS: bound.token_ids,
            CANDIDATE_LOGITS: bound.logits,
            LOG_NORMALIZER: bound.log_normalizer,
        }
        for name, array in outputs.items():
            bound.io.bind_ortvalue_output(name, ort_value(array))
        state.cache.bind(bound.io)
        return bound


def _open(session: ort.InferenceSession | None) -> ort.InferenceSession:
    if session is None:
        raise BackendError("ort: this session is closed; load the bundle again")
    return session


def _load(path: Path, threads: int | None) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads or 0
    options.inter_op_num_threads = 1
    try:
        return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise BackendError(
            f"ort: {path.name} does not load in onnxruntime {ort.__version__}, which must be 1.25 or newer: "
            f"{_first_line(error)}"
        ) from error


def _run(session: ort.InferenceSession, io: ort.IOBinding) -> None:
    try:
        session.run_with_iobinding(io)
    except Exception as error:
        raise BackendError(f"ort: the graph failed while running: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
