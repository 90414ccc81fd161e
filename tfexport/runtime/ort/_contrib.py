"""Run the contrib decoder on the CPU, in buffers that NumPy and the graphs share.

A beam keeps its cache row, whatever its rank. Only beams that branch are copied, to rows that no beam continues, and
only from the first different token on: equal tokens have equal keys and values.

Invariants between two calls:

- Source s has place s in the buffers of the encoder's keys and values, and rows s · width … of the cache.
- `_cache_rows[row]` is the row of `_cache` for the caller's row; rows of a source stay within its rows.
- `_shared[source][a][b]` tokens at the start of cache rows a and b of a source are equal.
- `_longest` is the largest of `lengths`; `_is_even` means that all are equal to it.
- `_bindings` refer to the current buffers; they are cleared when a buffer is replaced.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import onnxruntime as ort

from tfexport import contract
from tfexport.errors import InputError
from tfexport.runtime.checked import CheckedScoring, check_step
from tfexport.runtime.ort._cache import FIRST_CAPACITY
from tfexport.runtime.ort._device import Array, OrtGraphs, encoder_runs, has_many_scores, host_value, run, still_open
from tfexport.runtime.session import Candidates, Floats, Ids, Mask, Prompts, close_up, given_candidates, rows_of
from tfexport.runtime.sources import Sources

# Most bindings of a batch; the number of rows changes as sources come and go.
MAX_BINDINGS = 64
# Number of tokens that a row shares with itself: all, also later ones.
_EQUAL = sys.maxsize


@dataclass
class _Binding:
    """The arrays of a step, bound once for all steps of equal shape."""

    io: ort.IOBinding
    inputs: dict[str, Array]  # the binding does not keep them alive
    target_ids: Ids
    positions: Ids
    last_and_total: Array
    token_ids: Ids
    logits: Floats
    log_normalizer: Floats
    all_logits: Floats | None = None  # of the vocabulary, bound if tokens are scored


class ContribBatch(CheckedScoring):
    """Sources being decoded in NumPy buffers; implements `MultiStep` and `Verifies`."""

    def __init__(self, graphs: OrtGraphs, width: int) -> None:
        super().__init__(graphs.spec, width)
        self._graphs = graphs
        self.can_verify = graphs.keeps_logits
        self._measure()
        self._num_sources = 0
        self._source_lengths: Ids = np.empty(0, np.int64)
        self._source_mask: Mask = np.empty((0, 0), np.bool_)
        self._cross: list[Array] = []
        self._cache: Floats = self._new_cache(0, min(FIRST_CAPACITY, self._spec.max_target_length))
        self._cache_rows: Ids = np.empty(0, np.int64)
        self._shared: list[list[list[int]]] = []
        self._rows_are_equal = False  # within each source, as after a first step
        self._bindings: dict[tuple[int, ...], _Binding] = {}

    def _add(self, sources: Sources, prompts: Prompts) -> None:
        lengths, first = sources.mask.sum(1), self._num_sources
        runs = encoder_runs(lengths)
        if first or len(runs) > 1:
            self._reserve_sources(first + len(lengths), int(lengths.max()))
            for rows in runs:
                longest = lengths[rows[0]]
                parts, places = self._encode(sources.take(rows)), first + rows
                for whole, part in zip(self._cross, parts, strict=True):
                    whole[places, :, :longest] = part
                    whole[places, :, longest:] = 0  # the last user of a place may have left NaN
                self._source_mask[places] = np.arange(self._source_mask.shape[1]) < lengths[rows, None]
        else:
            self._cross, self._source_mask = self._encode(sources), sources.mask.copy()
            self._bindings.clear()
        self._num_sources += len(lengths)
        self._source_lengths = np.concatenate((self._source_lengths, lengths))
        begin = self.lengths.size
        prompt_lengths = np.array([len(prompt) - 1 for prompt in prompts])
        self._reserve_rows(self._num_sources * self.width, int(prompt_lengths.max()))
        self.lengths = np.concatenate((self.lengths, prompt_lengths.repeat(self.width)))
        self._measure()
        self._cache_rows = np.concatenate((self._cache_rows, np.arange(begin, self.lengths.size)))
        self._rows_are_equal = False
        if self.width > 1:
            self._shared += [_shared(self.width, length) for length in prompt_lengths.tolist()]
        self._read(first, prompts)

    def _step(self, target_ids: Ids, num_candidates: int) -> Candidates:
        by_source = target_ids.reshape(-1, self.width)
        if self.width > 1 and not self._longest and (by_source == by_source[:, :1]).all():
            return self._first_step(by_source[:, 0], num_candidates)
        bound, rows = self._bound(num_candidates), self._cache_rows
        self._run(bound, target_ids)
        # `take` is three to five times as fast as indexing for few numbers.
        return Candidates(
            bound.token_ids.take(rows, 0), bound.logits.take(rows, 0), bound.log_normalizer.ravel().take(rows)
        )

    def _score_step(self, target_ids: Ids, next_ids: Ids) -> Candidates:
        bound, rows = self._bound(1), self._cache_rows
        if bound.all_logits is None:
            bound.all_logits = np.empty((rows.size, self._spec.vocab), np.float32)
            bound.io.bind_ortvalue_output(contract.LOGITS, host_value(bound.all_logits))
        self._run(bound, target_ids)
        return given_candidates(next_ids, bound.all_logits[rows], bound.log_normalizer.ravel().take(rows))

    def multi_step(self, target_ids: Ids, num_candidates: int, steps: int, stop_ids: frozenset[int]) -> Candidates:
        """Take several greedy steps."""
        check_step(self._spec, self.lengths, target_ids, num_candidates, steps)
        token_ids = np.empty((steps, target_ids.size, num_candidates), np.int64)
        logits = np.empty((steps, target_ids.size, num_candidates), np.float32)
        log_normalizer = np.empty((steps, target_ids.size), np.float32)
        taken, rows = 0, self._cache_rows
        bound = self._bound(num_candidates)
        bound.target_ids[rows, 0] = target_ids
        while True:
            self._place(bound)
            run(self._graphs.decoder, bound.io)
            token_ids[taken], logits[taken] = bound.token_ids, bound.logits
            log_normalizer[taken] = bound.log_normalizer[:, 0]
            taken += 1
            self._longest += 1
            if not self._is_even:
                self.lengths += 1
            best = bound.token_ids[:, 0]
            if taken == steps or not stop_ids.isdisjoint(best.tolist()):
                break
            if self._longest == self._cache.shape[3]:
                bound = self._bound(num_candidates)
            bound.target_ids[:, 0] = best
        if self._is_even:
            self.lengths += taken
        every = np.s_[:taken, rows]
        return Candidates(token_ids[every], logits[every], log_normalizer[every])

    def verify(self, target_ids: Ids, num_candidates: int) -> Candidates:
        """Read several tokens of the only row and return the candidates after each."""
        lengths, count, begin = self.lengths, target_ids.size, self._longest
        if lengths.size != 1 or target_ids.ndim != 1:
            raise InputError(f"target_ids is {target_ids.shape} for {lengths.size} rows, expected [tokens] of one row")
        check_step(self._spec, lengths.repeat(count), target_ids, num_candidates, count)
        bound = self._bound(num_candidates, count)
        bound.target_ids[0] = target_ids
        bound.positions[0] = np.arange(begin, begin + count)
        bound.last_and_total[:] = begin + count - 1, begin + count
        run(self._graphs.decoder, bound.io)
        self.lengths += count
        self._longest += count
        return Candidates(bound.token_ids.copy(), bound.logits.copy(), bound.log_normalizer[:, 0].copy())

    def rewind(self, length: int) -> None:
        """Remove the tokens of the only row from `length` on."""
        lengths = self.lengths.tolist()
        if len(lengths) != 1 or not 0 <= length <= lengths[0]:
            raise InputError(f"length is {length} for rows of {lengths}, expected 0 up to that of one row")
        self.lengths[0] = self._longest = length  # later tokens are not read before they are overwritten

    def _reorder(self, rows: Ids) -> None:
        if self.width == 1 or self._rows_are_equal:
            return
        # Lists take 1.4 µs for 4 rows, arrays 8 µs; for 128 rows they are about equal.
        cache_rows: list[int] = self._cache_rows.take(rows).tolist()
        continued, copies = set(), []
        for row, cache_row in enumerate(cache_rows):
            if cache_row in continued:
                copies.append(row)
            continued.add(cache_row)
        for row in copies:
            of = cache_rows[row]
            first = of - of % self.width
            to = next(place for place in range(first, first + self.width) if place not in continued)
            self._copy_row(to, of)
            continued.add(to)
            cache_rows[row] = to
        self._cache_rows = np.array(cache_rows)

    def _remove(self, sources: Ids) -> None:
        remaining = close_up(self._num_sources, sources)
        for to in np.flatnonzero(remaining != np.arange(remaining.size)).tolist():
            self._move_source(to, int(remaining[to]))
        self._num_sources = remaining.size
        self.lengths = self.lengths[rows_of(remaining, self.width)]
        self._cache_rows = self._cache_rows[: self.lengths.size]
        self._measure()
        self._source_lengths = self._source_lengths[remaining]
        del self._shared[remaining.size :]

    def _encode(self, sources: Sources) -> list[Array]:
        io = self._graphs.bind_encoder(sources)
        own: list[Array] = []
        for name in self._graphs.cross:
            if has_many_scores(sources):  # ONNX Runtime cannot free its memory if an output is in it
                shape = (len(sources), self._spec.cache_heads, sources.source_len, self._spec.head_dim)
                own.append(np.empty(shape, np.float32))
                io.bind_ortvalue_output(name, host_value(own[-1]))
            else:
                io.bind_output(name)
        self._graphs.run_encoder(io, sources)
        return own or [value.numpy() for value in io.get_outputs()]

    def _reserve_sources(self, sources: int, longest: int) -> None:
        places, length = self._source_mask.shape
        longest = max(longest, int(self._source_lengths.max(initial=0)))
        if sources <= places and longest <= length <= 2 * longest:
            return
        if self._num_sources:  # room for the next ones too
            longest = min(1 << (longest - 1).bit_length(), self._spec.max_source_length)
        if sources > places and places:
            sources = max(sources, 2 * places)
        live, common, spec = self._num_sources, min(length, longest), self._spec
        # Zeros, because masked places must be finite.
        shape = (max(sources, places), spec.cache_heads, longest, spec.head_dim)
        grown: list[Array] = [np.zeros(shape, np.float32) for _ in range(2 * spec.layers)]
        for new, old in zip(grown, self._cross, strict=False):
            new[:live, :, :common] = old[:live, :, :common]
        mask = np.zeros((shape[0], longest), np.bool_)
        mask[:live, :common] = self._source_mask[:live, :common]
        self._cross, self._source_mask = grown, mask
        self._bindings.clear()

    def _reserve_rows(self, rows: int, length: int = 0) -> None:
        _, old_rows, _, capacity, _ = self._cache.shape
        if rows <= old_rows and length <= capacity:
            return
        if rows > old_rows and old_rows:
            rows = max(rows, 2 * old_rows)
        while capacity < length:
            capacity = min(2 * capacity, self._spec.max_target_length)
        grown, live = self._new_cache(max(rows, old_rows), capacity), self.lengths.size
        if self._longest:
            grown[:, : min(live, old_rows), :, : self._longest] = self._cache[:, :live, :, : self._longest]
        self._cache = grown
        self._bindings.clear()

    def _new_cache(self, rows: int, capacity: int) -> Floats:
        # Not zeroed, because the operator reads only the filled places.
        spec = self._spec
        return np.empty((2 * spec.layers, rows, spec.cache_heads, capacity, spec.head_dim), np.float32)

    def _read(self, first: int, prompts: Prompts) -> None:
        # The last token of a prompt is read by the first step; equally long prompts are read together.
        for length, group in groupby(prompts, len):
            ids = np.array([prompt[:-1] for prompt in group], np.int64)
            last = first + len(ids)
            if length > 1:
                sources, rows = slice(first, last), slice(first * self.width, last * self.width)
                bound = self._bind(sources, rows, length - 1, 1)
                bound.target_ids[:] = ids.repeat(self.width, 0)
                bound.positions[:] = np.arange(length - 1)
                bound.last_and_total[:-1], bound.last_and_total[-1] = length - 2, length - 1
                run(self._graphs.decoder, bound.io)
            first = last

    def _measure(self) -> None:
        lengths = self.lengths.tolist()
        self._longest = max(lengths, default=0)
        self._is_even = min(lengths, default=0) == self._longest

    def _first_step(self, target_ids: Ids, num_candidates: int) -> Candidates:
        # Equal rows are read once for each source, then copied.
        sources, width = self._num_sources, self.width
        bound = self._bind(slice(sources), slice(sources), 1, num_candidates)
        bound.target_ids[:, 0] = target_ids
        self._place(bound)
        run(self._graphs.decoder, bound.io)
        self._cache[:, : sources * width, :, :1] = self._cache[:, :sources, :, :1].repeat(width, 1)
        self.lengths += 1
        self._longest, self._rows_are_equal = 1, True
        self._shared = [_shared(width, 1) for _ in range(sources)]
        return Candidates(
            bound.token_ids.repeat(width, 0), bound.logits.repeat(width, 0), bound.log_normalizer[:, 0].repeat(width)
        )

    def _run(self, bound: _Binding, target_ids: Ids) -> None:
        self._rows_are_equal = False
        bound.target_ids[self._cache_rows, 0] = target_ids
        self._place(bound)
        run(self._graphs.decoder, bound.io)
        self.lengths += 1
        self._longest += 1

    def _bound(self, num_candidates: int, target_len: int = 1) -> _Binding:
        if self._longest + target_len > self._cache.shape[3]:
            self._reserve_rows(0, self._longest + target_len)
        key = (self._num_sources, num_candidates, target_len)
        bound = self._bindings.get(key)
        if bound is None:
            if len(self._bindings) == MAX_BINDINGS:
                del self._bindings[next(iter(self._bindings))]
            bound = self._bindings[key] = self._bind(
                slice(self._num_sources), slice(self.lengths.size), target_len, num_candidates, target_len
            )
        return bound

    def _place(self, bound: _Binding) -> None:
        if self._is_even:  # filling takes a third of the time, and `multi_step` updates `lengths` only at its end
            bound.positions.fill(self._longest)
            bound.last_and_total.fill(self._longest)
        else:
            bound.positions[:] = self.lengths[:, None]
            bound.last_and_total[:-1] = self.lengths
        bound.last_and_total[-1] = self._longest + 1

    def _bind(self, sources: slice, rows: slice, target_len: int, num_candidates: int, keeps: int = 1) -> _Binding:
        io = still_open(self._graphs.decoder).io_binding()
        num_rows = rows.stop - (rows.start or 0)
        last_and_total = np.empty(num_rows + 1, np.int32)  # one array, so that both are filled at once
        target_ids, positions = (np.empty((num_rows, target_len), np.int64) for _ in range(2))
        inputs: dict[str, Array] = {
            contract.TARGET_IDS: target_ids,
            contract.SOURCE_MASK: self._source_mask[sources],
            contract.POSITIONS: positions,
            contract.LAST_POSITION: last_and_total[:-1],
            contract.TOTAL_LENGTH: last_and_total[-1:],
            contract.NUM_CANDIDATES: np.array([num_candidates]),
            **{name: array[sources] for name, array in zip(self._graphs.cross, self._cross, strict=True)},
        }
        if self.can_verify:
            inputs[contract.LOGITS_TO_KEEP] = np.array([keeps])
        outputs: dict[str, Array] = {
            contract.CANDIDATE_IDS: np.empty((num_rows * keeps, num_candidates), np.int64),
            contract.CANDIDATE_LOGITS: np.empty((num_rows * keeps, num_candidates), np.float32),
            contract.LOG_NORMALIZER: np.empty((num_rows * keeps, 1), np.float32),
        }
        for name, array in inputs.items():
            io.bind_ortvalue_input(name, host_value(array))
        for name, array in outputs.items():
            io.bind_ortvalue_output(name, host_value(array))
        for past, present, buffer in zip(self._graphs.past, self._graphs.present, self._cache, strict=True):
            value = host_value(buffer[rows])
            io.bind_ortvalue_input(past, value)
            io.bind_ortvalue_output(present, value)
        return _Binding(io, inputs, target_ids, positions, last_and_total, *outputs.values())

    def _copy_row(self, to: int, of: int) -> None:
        source, new, old = to // self.width, to % self.width, of % self.width
        shared, length = self._shared[source], int(self.lengths[to])
        different = slice(shared[new][old], length)
        self._cache[:, to, :, different] = self._cache[:, of, :, different]
        shared[new] = [min(common, length) for common in shared[old]]
        for row, common in zip(shared, shared[new], strict=True):
            row[new] = common
        shared[new][new] = _EQUAL

    def _move_source(self, to: int, of: int) -> None:
        for array in (*self._cross, self._source_mask):
            array[to] = array[of]
        width, length = self.width, int(self.lengths[of * self.width])
        new, old = slice(to * width, (to + 1) * width), slice(of * width, (of + 1) * width)
        self._cache[:, new, :, :length] = self._cache[:, old, :, :length]
        self._cache_rows[new] = self._cache_rows[old] + (to - of) * width
        if width > 1:
            self._shared[to] = self._shared[of]


def _shared(width: int, length: int) -> list[list[int]]:
    return [[_EQUAL if row == other else length for other in range(width)] for row in range(width)]
