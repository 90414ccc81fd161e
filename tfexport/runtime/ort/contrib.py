"""The contrib form in ONNX Runtime on the CPU: buffers that numpy and the graphs share, and hypotheses that stay put.

A beam that goes on keeps its row of the cache, whatever its rank; only beams
that branch are copied, over rows that nobody continues, from the token on where
the two part: behind equal tokens lie equal keys and values. So the rows of the
buffers are in another order than the hypotheses of the caller: `slots`
translates.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from tfexport.errors import BackendError, InputError
from tfexport.runtime.ort.cache import FIRST_CAPACITY
from tfexport.runtime.ort.device import STEP_SPIN_US, OrtDevice, host_value, run, still_open
from tfexport.runtime.ort.lengths import runs
from tfexport.runtime.session import Candidates, Floats, Ids, Mask, check_rows, check_source, check_target
from tfexport.spec import (
    CANDIDATE_IDS,
    CANDIDATE_LOGITS,
    DECODER,
    ENCODER_CONTRIB,
    LAST_POSITION,
    LOG_NORMALIZER,
    NUM_CANDIDATES,
    POSITIONS,
    SOURCE_IDS,
    SOURCE_MASK,
    TARGET_IDS,
    TOTAL_LENGTH,
    Accuracy,
    ModelSpec,
    WeightType,
    key_value_names,
)

Array = NDArray[Any]

# How many tokens a row shares with itself: as many as there will be.
_EQUAL = sys.maxsize


@dataclass
class ContribState:
    """One batch being decoded.

    Attributes:
        batch: sources still being decoded.
        rows: hypotheses, a multiple of batch.
        past_len: tokens in the cache of every row.
        slots: row of the buffers that holds each hypothesis, int64 [rows]; the rows of one source lie side by side.
        source_mask: bool [batch, source_len], in the order of the buffers, like all that follows.
        cross: keys and values of the source, float32 [batch, heads, source_len, head_dim] for each name.
        cache: keys and values of the target, float32 [2 · layers, at least rows, heads, capacity, head_dim].
        shared: with how many equal tokens two rows of a source begin, [batch][beams][beams].
        bound: what the next step is bound to; None when it must be bound anew.
    """

    batch: int
    rows: int
    past_len: int
    slots: Ids
    source_mask: Mask
    cross: list[Array]
    cache: Floats
    shared: list[list[list[int]]]
    bound: _Bound | None = field(default=None, repr=False)


@dataclass
class _Bound:
    """The arrays that a step reads and writes, bound once for many steps of equal shape."""

    io: ort.IOBinding
    inputs: dict[str, Array]
    token_ids: Ids
    logits: Floats
    log_normalizer: Floats

    def fits(self, target_len: int, num_candidates: int) -> bool:
        return bool(self.inputs[TARGET_IDS].shape[1] == target_len and self.token_ids.shape[1] == num_candidates)


class ContribSession:
    """A model in ONNX Runtime's own operators.

    Attributes:
        spec: sizes, limits and token ids.
        backend: "ort".
        form: "contrib".
    """

    backend = "ort"
    form = "contrib"
    max_rows: int | None = None
    max_candidates: int | None = None

    def __init__(
        self,
        graphs: Mapping[str, Path],
        spec: ModelSpec,
        threads: int | None = None,
        *,
        weights: WeightType | None = None,
    ) -> None:
        """Load the graphs.

        Args:
            graphs: path of each graph by its name in the contract.
            spec: of the model.
            threads: for one call; None means one for each core.
            weights: their type where it is narrower than that of the graphs.

        Raises:
            BackendError: ONNX Runtime cannot load a graph.
        """
        self.spec = spec
        self.accuracy: Accuracy = weights or spec.precision
        device = OrtDevice("cpu")
        name = DECODER["contrib"]
        # One after the other: while a graph loads, the whole weight file may lie in memory beside what it becomes.
        self._encoder: ort.InferenceSession | None = device.load(graphs[ENCODER_CONTRIB], ENCODER_CONTRIB, threads)
        self._decoder: ort.InferenceSession | None = device.load(graphs[name], name, threads, spin_us=STEP_SPIN_US)
        self._cross_names = key_value_names("cross", spec.layers)
        self._caches = list(
            zip(key_value_names("past", spec.layers), key_value_names("present", spec.layers), strict=True)
        )

    def encode(self, source_ids: Ids, source_mask: Mask) -> ContribState:
        """Encode a batch and make room for one row a source; see `Session.encode`."""
        check_source(self.spec, source_ids, source_mask)
        cross = self._cross(source_ids, source_mask)
        batch = len(source_ids)
        capacity = min(FIRST_CAPACITY, self.spec.max_target_length)
        return ContribState(
            batch=batch,
            rows=batch,
            past_len=0,
            slots=np.arange(batch),
            source_mask=source_mask.copy(),
            cross=cross,
            cache=self._buffers(batch, capacity),
            shared=[[[_EQUAL]] for _ in range(batch)],
        )

    def step(self, state: ContribState, target_ids: Ids, num_candidates: int) -> Candidates:
        """Run the decoder on the newest tokens; see `Session.step`."""
        check_target(self.spec, state, target_ids, num_candidates)
        if target_ids.shape[1] > 1 and state.past_len and state.rows > 1:
            # The operator takes several tokens behind others for one row alone.
            for column in range(target_ids.shape[1] - 1):
                self._step(state, target_ids[:, column : column + 1], 1)
            target_ids = target_ids[:, -1:]
        return self._step(state, target_ids, num_candidates)

    def ahead(self, state: ContribState, target_ids: Ids, num_candidates: int, steps: int, stop_id: int) -> Candidates:
        """Take greedy steps until the best token of some row is `stop_id`; see `RunsAhead.ahead`."""
        length = state.past_len + target_ids.shape[1] + steps - 1
        if length > self.spec.max_target_length:
            raise InputError(
                f"{steps} steps end at {length} tokens, the limit is {self.spec.max_target_length}; "
                "lower max_new_tokens"
            )
        self.step(state, target_ids, num_candidates)
        token_ids = np.empty((steps, state.rows, num_candidates), np.int64)
        logits = np.empty((steps, state.rows, num_candidates), np.float32)
        log_normalizer = np.empty((steps, state.rows), np.float32)
        taken, bound = 0, state.bound
        assert bound is not None
        while True:
            token_ids[taken], logits[taken], log_normalizer[taken] = (
                bound.token_ids, bound.logits, bound.log_normalizer[:, 0],
            )  # fmt: skip
            best = token_ids[taken, :, 0]
            taken += 1
            if taken == steps or stop_id in best.tolist():
                break
            bound = self._bound(state, 1, num_candidates)
            bound.inputs[TARGET_IDS][:, 0] = best
            self._run(state, bound, 1)
        every = np.s_[:taken, state.slots]
        return Candidates(token_ids[every], logits[every], log_normalizer[every])

    def reorder(self, state: ContribState, rows: Ids) -> None:
        """Let row r continue what row rows[r] was; see `Session.reorder`."""
        kept = check_rows(state, rows)
        if rows.size * state.batch != kept.size * state.rows:
            self._regroup(state, rows, kept)
            return
        _branch(state, rows)
        if kept.size < state.batch:
            _leave(state, kept.size)

    def hidden_states(self, source_ids: Ids, source_mask: Mask) -> Floats:
        """Refuse: only an encoder alone gives its hidden states; see `Session.hidden_states`."""
        raise BackendError("ort: this bundle has a decoder and gives no hidden states; use generate")

    def close(self) -> None:
        """Free the graphs; the session cannot be used afterwards."""
        self._encoder = self._decoder = None

    def _cross(self, source_ids: Ids, source_mask: Mask) -> list[Array]:
        """Encode sources of about equal length together, and lay what belongs to short ones out as to the longest."""
        lengths = source_mask.sum(1)
        divided = runs(lengths)
        if len(divided) == 1:
            return self._encode(source_ids, source_mask)
        spec = self.spec
        shape = (len(source_ids), spec.heads, source_ids.shape[1], spec.head_dim)
        cross: list[Array] = [np.zeros(shape, np.float32) for _ in self._cross_names]  # what is masked must be finite
        for rows in divided:
            longest = lengths[rows[0]]
            parts = self._encode(source_ids[rows, :longest], source_mask[rows, :longest])
            for whole, part in zip(cross, parts, strict=True):
                whole[rows, :, :longest] = part
        return cross

    def _encode(self, source_ids: Ids, source_mask: Mask) -> list[Array]:
        encoder = still_open(self._encoder)
        io = encoder.io_binding()
        source = {SOURCE_IDS: host_value(source_ids), SOURCE_MASK: host_value(source_mask)}
        for name, value in source.items():
            io.bind_ortvalue_input(name, value)
        for name in self._cross_names:
            io.bind_output(name)
        run(encoder, io)
        return [value.numpy() for value in io.get_outputs()]

    def _step(self, state: ContribState, target_ids: Ids, num_candidates: int) -> Candidates:
        bound, slots = self._bound(state, target_ids.shape[1], num_candidates), state.slots
        bound.inputs[TARGET_IDS][slots] = target_ids
        self._run(state, bound, target_ids.shape[1])
        # `take` is three to five times as fast as an index for so few numbers.
        return Candidates(
            bound.token_ids.take(slots, 0), bound.logits.take(slots, 0), bound.log_normalizer.ravel().take(slots)
        )

    def _bound(self, state: ContribState, target_len: int, num_candidates: int) -> _Bound:
        """Return what the next step is bound to, with room for its tokens."""
        if state.past_len + target_len > state.cache.shape[3]:
            self._grow(state, state.past_len + target_len)
        if state.bound is None or not state.bound.fits(target_len, num_candidates):
            state.bound = self._bind(state, target_len, num_candidates)
        return state.bound

    def _run(self, state: ContribState, bound: _Bound, target_len: int) -> None:
        """Read the bound tokens."""
        total = state.past_len + target_len
        bound.inputs[POSITIONS][:] = state.past_len if target_len == 1 else np.arange(state.past_len, total)
        bound.inputs[LAST_POSITION][:] = total - 1
        bound.inputs[TOTAL_LENGTH][:] = total
        run(still_open(self._decoder), bound.io)
        state.past_len = total

    def _bind(self, state: ContribState, target_len: int, num_candidates: int) -> _Bound:
        io, rows = still_open(self._decoder).io_binding(), state.rows
        inputs: dict[str, Array] = {
            TARGET_IDS: np.empty((rows, target_len), np.int64),
            SOURCE_MASK: state.source_mask,
            POSITIONS: np.empty((rows, target_len), np.int64),
            LAST_POSITION: np.empty(rows, np.int32),
            TOTAL_LENGTH: np.empty(1, np.int32),
            NUM_CANDIDATES: np.array([num_candidates]),
            **dict(zip(self._cross_names, state.cross, strict=True)),
        }
        bound = _Bound(
            io,
            inputs,
            token_ids=np.empty((rows, num_candidates), np.int64),
            logits=np.empty((rows, num_candidates), np.float32),
            log_normalizer=np.empty((rows, 1), np.float32),
        )
        for name, array in inputs.items():
            io.bind_ortvalue_input(name, host_value(array))
        for (past, present), buffer in zip(self._caches, state.cache, strict=True):
            value = host_value(buffer[:rows])
            io.bind_ortvalue_input(past, value)
            io.bind_ortvalue_output(present, value)
        outputs: dict[str, Array] = {
            CANDIDATE_IDS: bound.token_ids,
            CANDIDATE_LOGITS: bound.logits,
            LOG_NORMALIZER: bound.log_normalizer,
        }
        for name, array in outputs.items():
            io.bind_ortvalue_output(name, host_value(array))
        return bound

    def _buffers(self, rows: int, capacity: int) -> Floats:
        # Not zeroed: the operator reads no further than a row is filled.
        return np.empty((len(self._caches), rows, self.spec.heads, capacity, self.spec.head_dim), np.float32)

    def _grow(self, state: ContribState, length: int) -> None:
        """Double the buffers until `length` tokens fit."""
        capacity = state.cache.shape[3]
        while capacity < length:
            capacity = min(2 * capacity, self.spec.max_target_length)
        grown = self._buffers(state.rows, capacity)
        grown[:, :, :, : state.past_len] = state.cache[:, : state.rows, :, : state.past_len]
        state.cache, state.bound = grown, None

    def _regroup(self, state: ContribState, rows: Ids, kept: Ids) -> None:
        """Give every source another number of rows, in new buffers that have the order of the hypotheses."""
        grown, beams = self._buffers(rows.size, state.cache.shape[3]), state.rows // state.batch
        origin = state.slots[rows]
        grown[:, :, :, : state.past_len] = state.cache[:, origin, :, : state.past_len]
        sources, places = np.divmod(origin.reshape(kept.size, -1), beams)
        first = sources[:, 0]
        if first.size != state.batch or (first != np.arange(first.size)).any():
            state.cross = [array[first] for array in state.cross]
            state.source_mask = state.source_mask[first]
        shared = np.array(state.shared)[first[:, None, None], places[:, :, None], places[:, None]].clip(
            max=state.past_len
        )
        shared[:, np.eye(places.shape[1], dtype=bool)] = _EQUAL
        state.shared = shared.tolist()
        state.cache, state.slots, state.bound = grown, np.arange(rows.size), None
        state.batch, state.rows = kept.size, rows.size


def _branch(state: ContribState, rows: Ids) -> None:
    """Give each hypothesis the row of the one it continues; all but the first of several a dead one."""
    # Lists: 1.4 µs instead of 8 with arrays for 4 rows, 4 for 32, and for 128 hardly more than arrays.
    slots: list[int] = state.slots.take(rows).tolist()
    continued, copies = set(), []
    for row, slot in enumerate(slots):
        if slot in continued:
            copies.append(row)
        continued.add(slot)
    beams = state.rows // state.batch
    for row in copies:
        of = slots[row]
        first = of - of % beams
        to = next(slot for slot in range(first, first + beams) if slot not in continued)
        _copy_row(state, to, of)
        continued.add(to)
        slots[row] = to
    state.slots = np.array(slots)


def _copy_row(state: ContribState, to: int, of: int) -> None:
    """Make a dead row equal to another of its source."""
    beams = state.rows // state.batch
    shared, new, old = state.shared[of // beams], to % beams, of % beams
    parted = slice(shared[new][old], state.past_len)
    state.cache[:, to, :, parted] = state.cache[:, of, :, parted]
    shared[new] = [min(length, state.past_len) for length in shared[old]]
    for row, length in zip(shared, shared[new], strict=True):
        row[new] = length
    shared[new][new] = _EQUAL


def _leave(state: ContribState, batch: int) -> None:
    """Let the buffers end behind `batch` sources: what lies behind moves to the places of those that left."""
    beams = state.rows // state.batch
    sources = state.slots[::beams] // beams
    behind = np.flatnonzero(sources >= batch)
    free = np.setdiff1d(np.arange(batch), sources)
    for place, to in zip(behind.tolist(), free.tolist(), strict=True):
        of = int(sources[place])
        for array in (*state.cross, state.source_mask):
            array[to] = array[of]
        state.shared[to] = state.shared[of]
        for beam in range(beams):
            state.cache[:, to * beams + beam, :, : state.past_len] = state.cache[
                :, of * beams + beam, :, : state.past_len
            ]
        state.slots[place * beams : (place + 1) * beams] += (to - of) * beams
    state.cross = [array[:batch] for array in state.cross]
    state.source_mask, state.shared = state.source_mask[:batch], state.shared[:batch]
    state.batch, state.rows, state.bound = batch, batch * beams, None
