"""TensorRT engines as a backend: the cache, the choice of tokens and the moves of beams stay on the GPU."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tfexport.errors import BackendError, InputError
from tfexport.runtime.session import Candidates, Floats, Ids, Mask, check_rows, check_source, check_target
from tfexport.runtime.trt.engine import Engine
from tfexport.runtime.trt.layout import BatchLayout, bucket
from tfexport.runtime.trt.replica import Replica, ReplicaPool
from tfexport.runtime.trt.workspace import EngineSet
from tfexport.spec import (
    DECODER,
    ENCODER,
    REORDER,
    Accuracy,
    Form,
    ModelSpec,
    WeightType,
    decoder_graph,
    encoder_graph,
    key_value_names,
    reorder_spec,
)
from tfexport.trt.config import EngineLimits
from tfexport.trt.cuda import Cuda
from tfexport.trt.library import Flavour


@dataclass(eq=False)
class TrtState:
    """One batch being decoded; its replica goes back to the session when the state is forgotten.

    Attributes:
        batch: sources still being decoded.
        rows: hypotheses, a multiple of batch.
        past_len: tokens in the cache of every row.
        lanes: where the rows lie on the device.
        replica: decodes this batch alone.
    """

    batch: int
    rows: int
    past_len: int
    lanes: BatchLayout = field(repr=False)
    replica: Replica = field(repr=False)


class TrtSession:
    """Engines of TensorRT 10, 11 or TensorRT-RTX on the first GPU.

    In the static form the batch is laid out in a power of two of lanes and the
    source in a power of two of places, so that a few CUDA graphs serve all
    batches; what is not used is masked.

    Attributes:
        spec: sizes, limits and token ids; the lengths are those that the engines take.
        backend: "trt".
        max_rows: hypotheses that the engines take at once.
        accuracy: type of the weights where it is narrower than that of the graphs.
        max_candidates: best tokens that the engines return at most.
        form: of the decoder; None for an encoder alone.
    """

    backend = "trt"

    def __init__(
        self,
        engines: Mapping[str, Any],
        spec: ModelSpec,
        form: Form | None,
        limits: EngineLimits,
        flavour: Flavour,
        cuda: Cuda,
        *,
        weights: WeightType | None = None,
        reason: Callable[[], str] = lambda: "see the log of the library",
    ) -> None:
        """Take deserialised engines, which the session shares with whoever else drives them.

        Args:
            engines: `ICudaEngine` by name of its graph, `reorder` included where there is a decoder.
            spec: of the model, in the precision of the engines.
            form: of the decoder; None for an encoder alone.
            limits: the largest shapes of the engines.
            flavour: the library that they come from.
            cuda: the device that they were loaded on.
            weights: type of the matrices where it is narrower than `spec` says.
            reason: says what the library's log holds of the newest failure.

        Raises:
            BackendError: an engine is missing or is not what its name says.
        """
        contracts = {ENCODER: (encoder_graph(spec), 1)}
        if form:
            contracts |= {DECODER[form]: (decoder_graph(spec, form), 2), REORDER: (reorder_spec(spec.precision), 1)}
        made = {}
        for name, (contract, num_profiles) in contracts.items():
            if name not in engines:
                raise BackendError(f"trt: there is no engine {name}; build it with tfexport trt BUNDLE --force")
            made[name] = Engine(name, engines[name], flavour.trt, reason)
            made[name].check(contract, num_profiles, _aliases(spec) if name == DECODER["static"] else {})
        self.form = form
        self.accuracy: Accuracy = weights or spec.precision
        self.max_rows: int | None = limits.max_batch
        self.max_candidates: int | None = limits.max_candidates
        self._model, self._limits = spec, limits
        self.spec = dataclasses.replace(
            spec,
            max_source_length=min(spec.max_source_length, limits.max_source_length),
            max_target_length=min(spec.max_target_length, limits.max_target_length),
        )
        self._pool: ReplicaPool | None = ReplicaPool(EngineSet(made, spec, form, limits, cuda))

    def encode(self, source_ids: Ids, source_mask: Mask) -> TrtState:
        """Encode a batch and make room for one row a source; see `Session.encode`."""
        pool = self._open()
        if self.form is None:
            raise BackendError("trt: this bundle is an encoder alone and cannot generate; use embed")
        self._check_source(source_ids, source_mask)
        batch, source_len = source_ids.shape
        if self.form == "static":
            source_len = bucket(source_len, self._limits.max_source_length)
        lanes = BatchLayout.of(batch, self._width(batch, 1))
        padding = (0, lanes.width - batch), (0, source_len - source_ids.shape[1])
        ids, mask = np.pad(source_ids, padding), np.pad(source_mask, padding)
        mask[batch:, 0] = True  # a lane without a source reads one token: attention to nothing is not defined
        replica = pool.take(ids.shape)
        state = TrtState(batch, batch, 0, lanes, replica)
        weakref.finalize(state, pool.give_back, replica).atexit = False
        with _watched(replica):
            replica.encode(ids, mask, lanes)
        return state

    def step(self, state: TrtState, target_ids: Ids, num_candidates: int) -> Candidates:
        """Run the decoder on the newest tokens; see `Session.step`."""
        self._open()
        self._check_target(state, target_ids, num_candidates)
        with _watched(state.replica):
            found = state.replica.step(state.lanes, target_ids, state.past_len, num_candidates)
        state.past_len += target_ids.shape[1]
        return found

    def reorder(self, state: TrtState, rows: Ids) -> None:
        """Let row r continue what row rows[r] was; see `Session.reorder`."""
        self._open()
        kept = check_rows(state, rows)
        _check_limit("rows", rows.size, self._limits.max_batch, "--max-batch")
        width = self._width(kept.size, rows.size // kept.size)
        lanes, move = state.lanes.reorder(kept, rows, width)
        with _watched(state.replica):
            state.replica.reorder(state.lanes, lanes, move, state.past_len)
        state.lanes, state.batch, state.rows = lanes, kept.size, rows.size

    def hidden_states(self, source_ids: Ids, source_mask: Mask) -> Floats:
        """Encode a batch with an encoder alone; see `Session.hidden_states`."""
        pool = self._open()
        if self.form is not None:
            raise BackendError("trt: this bundle has a decoder and gives no hidden states; use generate")
        self._check_source(source_ids, source_mask)
        replica = pool.take(source_ids.shape)
        try:
            with _watched(replica):
                return replica.hidden_states(source_ids, source_mask)
        finally:
            pool.give_back(replica)

    def memory_bytes(self) -> int:
        """Return the device memory that batches hold or have left for the next; weights are not counted."""
        return self._open().num_bytes

    def close(self) -> None:
        """Free everything, also under states that are still there; no other call may be running."""
        pool, self._pool = self._pool, None
        if pool:
            pool.close()

    def _open(self) -> ReplicaPool:
        if self._pool is None:
            raise BackendError("trt: this session is closed; load the bundle again")
        return self._pool

    def _width(self, batch: int, beams: int) -> int:
        """Return the lanes for a batch: in the static form a power of two, or as many as the engines take."""
        return bucket(batch, self._limits.max_batch // beams) if self.form == "static" else batch

    def _check_source(self, source_ids: Ids, source_mask: Mask) -> None:
        check_source(self._model, source_ids, source_mask)
        for what, number, most, option in (
            ("sources", source_ids.shape[0], self._limits.max_batch, "--max-batch"),
            ("source tokens", source_ids.shape[1], self._limits.max_source_length, "--max-source-length"),
        ):
            _check_limit(what, number, most, option)

    def _check_target(self, state: TrtState, target_ids: Ids, num_candidates: int) -> None:
        check_target(self._model, state, target_ids, num_candidates)
        length = state.past_len + target_ids.shape[1]
        _check_limit("target tokens", length, self._limits.max_target_length, "--max-target-length")
        _check_limit("candidates", num_candidates, self._limits.max_candidates, "--maxShapes", "num_candidates:")


def _check_limit(what: str, number: int, most: int, option: str, prefix: str = "") -> None:
    if number > most:
        raise InputError(
            f"trt: {number} {what}, the limit is {most} for these engines; ask for less, or build others: "
            f"tfexport trt BUNDLE {option} {prefix}{number} --force"
        )


def _aliases(spec: ModelSpec) -> dict[str, str]:
    names = (key_value_names(prefix, spec.layers) for prefix in ("present", "past"))
    return dict(zip(*names, strict=True))


@contextmanager
def _watched(replica: Replica) -> Iterator[None]:
    """Mark a replica in which something failed, so that no other batch gets it."""
    try:
        yield
    except BaseException:
        replica.is_broken = True
        raise
