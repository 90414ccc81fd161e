"""Run the contrib decoder on the CPU, in buffers that NumPy and the graphs share.

A beam keeps its cache row, whatever its rank. Only beams that branch are copied, to rows that no beam continues, and
only from the first different token on: equal tokens have equal keys and values.

Invariants between two calls:

- Source s has place s in the buffers of the encoder's keys and values, and rows s · width … of the cache.
- `_cache_rows[row]` is the row of `_cache` for the caller's row; rows of a source stay within its rows.
- `_shared[source][a · width + b]` tokens at the start of cache rows a and b of a source are equal.
- `_longest` is the largest of `lengths`; `_is_even` means that all are equal to it.
- `_bindings` refer to `_cache`; they are cleared when it is replaced.

When a batch is no longer used, its session keeps its buffers and bindings for a later one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from tfexport import contract
from tfexport.errors import InputError
from tfexport.runtime.checked import CheckedScoring, check_step
from tfexport.runtime.ort._binding import Binding, Shape
from tfexport.runtime.ort._cache import FIRST_CAPACITY
from tfexport.runtime.ort._device import Array, OrtGraphs, encoder_runs, has_many_scores, host_value
from tfexport.runtime.session import (
    ONE,
    Candidates,
    Floats,
    GreedySteps,
    Ids,
    Mask,
    Prompts,
    best_columns,
    close_up,
    given_candidates,
    rows_of,
)
from tfexport.runtime.sources import Sources

# Most bindings of a batch; the number of rows changes as sources come and go.
MAX_BINDINGS = 64
# Most caches that a session keeps for later batches, and the largest cache and outputs of a binding that it keeps.
_MAX_SPARE = 4
_MAX_SPARE_BYTES = 2**24
_MAX_OUTPUT_BYTES = 2**18
# Number of tokens that a row shares with itself: all, also later ones.
_EQUAL = sys.maxsize


@dataclass(frozen=True)
class EncodedSources(Sources):
    """Sources, and the rows, keys and values of each encoder run."""

    runs: tuple[tuple[Ids, list[Array]], ...] = ()


def encode_ahead(graphs: OrtGraphs, sources: Sources) -> EncodedSources:
    """Encode sources for batches of these graphs."""
    runs = tuple((rows, _encode(graphs, sources.take(rows))) for rows in encoder_runs(sources.lengths))
    return EncodedSources(sources.kind, sources.inputs, sources.checked, runs)


class ContribBatch(CheckedScoring):
    """Sources being decoded in NumPy buffers; implements `MultiStep` and `Verifies`."""

    def __init__(self, graphs: OrtGraphs, width: int) -> None:
        super().__init__(graphs.spec, width)
        self._graphs = graphs
        self.can_verify = graphs.keeps_logits
        self._kind = graphs.spec.cache
        self._measure()
        self._num_sources = 0
        self._source_lengths: list[int] = []
        self._source_mask: Mask = np.empty((0, 0), np.bool_)
        self._cross: list[Array] = []
        self._own = self._cross, self._source_mask  # those that are not the encoder's
        self._cache: Floats
        self._bindings: dict[Shape, Binding]
        try:
            self._cache, self._bindings, self._own = graphs.spare.pop()
        except IndexError:
            self._cache, self._bindings = self._new_cache(0, min(FIRST_CAPACITY, self._spec.max_target_length)), {}
        self._cache_rows: Ids = np.empty(0, np.int64)
        self._shared: list[list[int]] = []
        self._rows_are_equal = False  # within each source, as after a first step

    def __del__(self) -> None:
        spare = self._graphs.spare
        if self._graphs.decoder is None or len(spare) >= _MAX_SPARE or self._cache.nbytes > _MAX_SPARE_BYTES:
            return
        small = {key: bound for key, bound in self._bindings.items() if bound.output_bytes <= _MAX_OUTPUT_BYTES}
        for bound in small.values():
            bound.release_sources()
        if sum(array.nbytes for array in self._own[0]) > _MAX_SPARE_BYTES:
            self._own = [], np.empty((0, 0), np.bool_)
        spare.append((self._cache, small, self._own))

    def _add(self, sources: Sources, prompts: Prompts) -> None:
        first, begin = self._num_sources, self.lengths.size
        read = [len(prompt) - 1 for prompt in prompts for _ in range(self.width)]
        self._add_sources(sources)
        self._reserve_rows(begin + len(read), max(read))
        self.lengths = np.concatenate((self.lengths, read))
        self._measure()
        self._cache_rows = np.concatenate((self._cache_rows, np.arange(begin, self.lengths.size)))
        self._rows_are_equal = False
        if self.width > 1:
            self._shared += [_shared(self.width, length) for length in read[:: self.width]]
        if any(read):
            self._read(first, prompts)

    def _add_sources(self, sources: Sources) -> None:
        lengths, first = sources.lengths, self._num_sources
        runs: Iterable[tuple[Ids, list[Array]]]
        if isinstance(sources, EncodedSources):
            runs, has_one = sources.runs, False
        else:
            each = encoder_runs(lengths)
            runs, has_one = ((rows, self._encode(sources.take(rows))) for rows in each), len(each) == 1
        if first or not has_one:
            self._reserve_sources(first + len(lengths), int(lengths.max()))
            for rows, parts in runs:
                longest, places = lengths[rows[0]], first + rows
                for whole, part in zip(self._cross, parts, strict=True):
                    whole[places, :, :longest] = part
                    whole[places, :, longest:] = 0  # the last user of a place may have left NaN
                self._source_mask[places] = np.arange(self._source_mask.shape[1]) < lengths[rows, None]
        else:
            self._cross, self._source_mask = self._encode(sources), sources.mask.copy()
        self._num_sources += len(lengths)
        self._source_lengths += lengths.tolist()

    def _step(self, target_ids: Ids, num_candidates: int) -> Candidates:
        if self.width > 1 and not self._longest:
            by_source = target_ids.reshape(-1, self.width)
            if (by_source == by_source[:, :1]).all():
                return self._first_step(by_source[:, 0], num_candidates)
        bound, rows = self._bound(num_candidates), self._cache_rows
        self._run(bound, target_ids)
        if self.width == 1:  # then every row has its own cache row
            return bound.candidates()
        # `take` is three to five times as fast as indexing for few numbers.
        return Candidates(
            bound.token_ids.take(rows, 0), bound.logits.take(rows, 0), bound.log_normalizer.ravel().take(rows)
        )

    def _score_step(self, target_ids: Ids, next_ids: Ids) -> Candidates:
        bound, rows = self._bound(1, scores=True), self._cache_rows
        self._run(bound, target_ids)
        return given_candidates(next_ids, bound.all_logits[rows], bound.log_normalizer.ravel().take(rows))

    def multi_step(self, target_ids: Ids, steps: GreedySteps) -> Candidates:
        """Take several greedy steps, of a batch with one row for each source."""
        most, num_candidates, stop_ids, banned_ids, needs_scores = steps
        check_step(self._spec, self.lengths, target_ids, num_candidates, most)
        token_ids = np.empty((most, target_ids.size, num_candidates), np.int64)
        logits = np.empty((most, target_ids.size, num_candidates), np.float32)
        log_normalizer = np.empty((most, target_ids.size), np.float32)
        taken, watched = 0, stop_ids | banned_ids
        skips = not needs_scores and num_candidates <= contract.MAX_WITHOUT_SCORES and self._graphs.skips_scores
        bound = self._bound(num_candidates, skips_scores=skips)
        bound.target_ids[:, 0] = target_ids
        while True:
            self._place(bound)
            bound.run()
            token_ids[taken], logits[taken] = bound.token_ids, bound.logits
            log_normalizer[taken] = bound.log_normalizer[:, 0]
            taken += 1
            self._longest += 1
            if not self._is_even:
                self.lengths = self.lengths + ONE
            best = bound.token_ids[:, 0]
            is_stopped = False
            if not watched.isdisjoint(best.tolist()):
                best = bound.token_ids[np.arange(best.size), best_columns(bound.token_ids, banned_ids)]
                is_stopped = not stop_ids.isdisjoint(best.tolist())
            if taken == most or is_stopped:
                break
            if self._longest == self._capacity:
                bound = self._bound(num_candidates, skips_scores=skips)
            bound.target_ids[:, 0] = best
        if self._is_even:
            self.lengths += taken
        if skips:
            self._graphs.count_unproven(log_normalizer[:taken])
            log_normalizer[:taken] = 0
        return Candidates(token_ids[:taken], logits[:taken], log_normalizer[:taken])

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
        bound.run()
        self.lengths += count
        self._longest += count
        return bound.candidates()

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
        self._source_lengths = [self._source_lengths[source] for source in remaining.tolist()]
        del self._shared[remaining.size :]

    def _encode(self, sources: Sources) -> list[Array]:
        return _encode(self._graphs, sources)

    def _reserve_sources(self, sources: int, longest: int) -> None:
        if not self._num_sources:  # without padding that none of the first sources needs
            self._cross, self._source_mask = self._own
        places, length = self._source_mask.shape
        longest = max(longest, *self._source_lengths, 0)
        if sources <= places and longest <= length <= (2 * longest if self._num_sources else longest):
            return
        if self._num_sources:  # room for the next ones too
            longest = min(1 << (longest - 1).bit_length(), self._spec.max_source_length)
            if sources > places:
                sources = max(sources, 2 * places)
        live, common, spec = self._num_sources, min(length, longest), self._spec
        # Masked places must be finite; those of a source that joins are filled then.
        shape = (max(sources, places), spec.cache_heads, longest, spec.head_dim)
        grown: list[Array] = [np.empty(shape, np.float32) for _ in range(2 * spec.layers)]
        for new, old in zip(grown, self._cross, strict=False):
            new[:live, :, :common] = old[:live, :, :common]
            new[:live, :, common:] = 0
        mask = np.zeros((shape[0], longest), np.bool_)
        mask[:live, :common] = self._source_mask[:live, :common]
        self._cross, self._source_mask = self._own = grown, mask

    def _reserve_rows(self, rows: int, length: int = 0) -> None:
        old_rows, capacity = self._cache.shape[1], self._capacity
        if rows <= old_rows and length <= capacity:
            return
        if rows > old_rows and self.lengths.size:
            rows = max(rows, 2 * old_rows)
        while capacity < length:
            capacity = min(2 * capacity, self._spec.max_target_length)
        grown, live = self._new_cache(max(rows, old_rows), capacity), self.lengths.size
        if self._longest:
            grown[:, : min(live, old_rows), :, : self._longest] = self._cache[:, :live, :, : self._longest]
        self._cache = grown
        self._bindings.clear()

    def _new_cache(self, rows: int, capacity: int) -> Floats:
        # Not zeroed, because the graph reads only the filled places.
        kind, widths = self._kind, list(self._kind.widths.values())
        places = capacity if kind.grows else 1
        return np.empty((kind.layers * len(widths), rows, kind.heads, places, widths[0]), np.float32)

    @property
    def _capacity(self) -> int:
        return self._cache.shape[3] if self._kind.grows else self._spec.max_target_length

    def _read(self, first: int, prompts: Prompts) -> None:
        # The last token of a prompt is read by the first step; equally long prompts are read together.
        for length, group in groupby(prompts, len):
            ids = np.array([prompt[:-1] for prompt in group], np.int64)
            last = first + len(ids)
            if length > 1:
                read = length - 1 if self._kind.grows else 1
                bound = self._binding(Shape(first, last, self.width, 1, read))
                for begin, end in zip(range(0, length - 1, read), range(read, length, read), strict=True):
                    bound.target_ids[:] = ids[:, begin:end].repeat(self.width, 0)
                    bound.positions[:] = np.arange(begin, end)
                    bound.last_and_total[:-1], bound.last_and_total[-1] = end - 1, end
                    bound.run()
            first = last

    def _measure(self) -> None:
        lengths = self.lengths.tolist()
        self._longest = max(lengths, default=0)
        self._is_even = min(lengths, default=0) == self._longest

    def _first_step(self, target_ids: Ids, num_candidates: int) -> Candidates:
        # Equal rows are read once for each source, then copied.
        sources, width = self._num_sources, self.width
        bound = self._binding(Shape(0, sources, 1, num_candidates))
        bound.target_ids[:, 0] = target_ids
        self._place(bound)
        bound.run()
        self._cache[:, : sources * width, :, :1] = self._cache[:, :sources, :, :1].repeat(width, 1)
        self.lengths = self.lengths + ONE
        self._longest, self._rows_are_equal = 1, True
        shared = _shared(width, 1)
        self._shared = [shared.copy() for _ in range(sources)]
        return Candidates(
            bound.token_ids.repeat(width, 0), bound.logits.repeat(width, 0), bound.log_normalizer[:, 0].repeat(width)
        )

    def _run(self, bound: Binding, target_ids: Ids) -> None:
        self._rows_are_equal = False
        bound.target_ids.put(self._cache_rows, target_ids)
        self._place(bound)
        bound.run()
        self.lengths = self.lengths + ONE
        self._longest += 1

    def _bound(self, num_candidates: int, target_len: int = 1, **kind: bool) -> Binding:
        if self._longest + target_len > self._capacity:
            self._reserve_rows(0, self._longest + target_len)
        return self._binding(Shape(0, self._num_sources, self.width, num_candidates, target_len, target_len, **kind))

    def _binding(self, shape: Shape) -> Binding:
        bound = self._bindings.pop(shape, None)
        if bound is None:
            if len(self._bindings) == MAX_BINDINGS:
                del self._bindings[next(iter(self._bindings))]
            bound = Binding(self._graphs, self._cache, shape)
        self._bindings[shape] = bound  # last in the order of use
        bound.bind_sources(self._cross, self._source_mask)
        return bound

    def _place(self, bound: Binding) -> None:
        if self._is_even:  # filling takes a third of the time, and `multi_step` updates `lengths` only at its end
            bound.positions.fill(self._longest)
            bound.last_and_total.fill(self._longest)
        else:
            bound.positions[:] = self.lengths[:, None]
            bound.last_and_total[:-1] = self.lengths
        bound.last_and_total[-1] = self._longest + 1

    def _copy_row(self, to: int, of: int) -> None:
        width, length = self.width, int(self.lengths[to])
        source, new, old = to // width, to % width, of % width
        shared = self._shared[source]
        different = slice(shared[new * width + old], length) if self._kind.grows else slice(None)
        self._cache[:, to, :, different] = self._cache[:, of, :, different]
        common = [min(tokens, length) for tokens in shared[old * width : (old + 1) * width]]
        common[new] = _EQUAL
        shared[new * width : (new + 1) * width] = shared[new::width] = common

    def _move_source(self, to: int, of: int) -> None:
        for array in (*self._cross, self._source_mask):
            array[to] = array[of]
        width, length = self.width, int(self.lengths[of * self.width])
        new, old = slice(to * width, (to + 1) * width), slice(of * width, (of + 1) * width)
        self._cache[:, new, :, :length] = self._cache[:, old, :, :length]
        self._cache_rows[new] = self._cache_rows[old] + (to - of) * width
        if width > 1:
            self._shared[to] = self._shared[of]


def _encode(graphs: OrtGraphs, sources: Sources) -> list[Array]:
    if not has_many_scores(sources):
        return graphs.encode(sources)
    io, shape = graphs.bind_encoder(sources), (len(sources), graphs.spec.cache_heads, sources.source_len)
    # ONNX Runtime cannot free its memory if an output is in it.
    own: list[Array] = [np.empty((*shape, graphs.spec.head_dim), np.float32) for _ in graphs.cross]
    for name, array in zip(graphs.cross, own, strict=True):
        io.bind_ortvalue_output(name, host_value(array))
    graphs.run_encoder(io, sources)
    return own


def _shared(width: int, length: int) -> list[int]:
    shared = [length] * width**2
    shared[:: width + 1] = [_EQUAL] * width
    return shared
