"""Run the static decoder, which updates rows of any length in fixed buffers."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort

from tfexport.contract import SOURCE_MASK, CacheKind
from tfexport.runtime.checked import CheckedScoring
from tfexport.runtime.ort._cache import FIRST_CAPACITY, RowBuffers, row_buffers
from tfexport.runtime.ort._device import OrtGraphs, Step, encoder_runs
from tfexport.runtime.session import Candidates, Ids, Prompts, close_up, prefill_pieces, rows_of
from tfexport.runtime.sources import Sources

# Most bindings, for the latest numbers of rows and candidates.
_STEPS = 8
# Sources that join are padded to a multiple of this many tokens, so that few later ones are longer.
_SOURCE_BLOCK = 16


class StaticBatch(CheckedScoring):
    """Sources being decoded in the first rows of buffers."""

    def __init__(self, graphs: OrtGraphs, width: int) -> None:
        super().__init__(graphs.spec, width)
        self._graphs = graphs
        self._source_lengths: Ids = np.zeros(0, np.int64)
        self._begin()

    def _add(self, sources: Sources, prompts: Prompts) -> None:
        if not self.lengths.size:  # small buffers again; the contents of the old ones are not needed
            self._begin()
        old, new = self._source_lengths.size, len(sources)
        lengths: Ids = np.concatenate((self._source_lengths, sources.mask.sum(1)))
        read: Ids = np.array([len(prompt) - 1 for prompt in prompts])
        self._encode(sources, lengths)
        self._write_mask(lengths)
        rows = self.lengths.size + np.arange(new * self.width)
        longest = max(self.lengths.max(initial=0), read.max())
        are_zero = self._reserve(self.lengths.size + rows.size, int(longest) + 1)
        if read.any():
            self._caches.write(rows, self._prefill(prompts, old), np.arange(new).repeat(self.width))
        elif not are_zero:
            self._caches.clear(rows)
        self._source_lengths = lengths
        self.lengths = np.concatenate((self.lengths, read.repeat(self.width)))

    def _step(self, target_ids: Ids, num_candidates: int) -> Candidates:
        return self._run(target_ids, num_candidates).candidates()

    def _score_step(self, target_ids: Ids, next_ids: Ids) -> Candidates:
        return self._run(target_ids, None).given(next_ids)

    def _reorder(self, rows: Ids) -> None:
        if np.array_equal(rows, np.arange(rows.size)):
            return
        if self._caches.reorder(rows, int(self.lengths.max())):
            self._steps.clear()

    def _remove(self, sources: Ids) -> None:
        remaining = close_up(self._source_lengths.size, sources)
        moved = np.flatnonzero(remaining != np.arange(remaining.size))
        if moved.size:
            # No row is in both.
            self._cross.write(moved, self._cross, remaining[moved])
            self._caches.write(rows_of(moved, self.width), self._caches, rows_of(remaining[moved], self.width))
        self._source_lengths = self._source_lengths[remaining]
        self.lengths = self.lengths[rows_of(remaining, self.width)]
        self._write_mask(self._source_lengths)

    def _begin(self) -> None:
        self._caches = self._buffers(self._spec.cache, 0, min(FIRST_CAPACITY, self._spec.max_target_length))
        self._cross = self._buffers(self._spec.cross, 0, _SOURCE_BLOCK)
        self._mask: ort.OrtValue | None = None
        self._steps: dict[tuple[int, int | None], Step] = {}

    def _buffers(self, kind: CacheKind, rows: int, length: int) -> RowBuffers:
        return row_buffers(kind, self._graphs.gather, rows, length)

    def _encode(self, sources: Sources, lengths: Ids) -> None:
        old, new = lengths.size - len(sources), len(sources)
        # A single padded run is faster on a GPU.
        runs = encoder_runs(lengths[old:]) if self._graphs.gather is None else [np.arange(new)]
        if not old and len(runs) == 1:
            self._cross = self._run_encoder(sources.resized(int(lengths.max())))
            return
        self._reserve_cross(old, lengths)
        for rows in runs:
            self._cross.write(old + rows, self._run_encoder(sources.take(rows)), np.arange(rows.size))

    def _run_encoder(self, sources: Sources) -> RowBuffers:
        found = self._buffers(self._spec.cross, *sources.mask.shape)
        io = self._graphs.bind_encoder(sources)
        found.bind(io.bind_output, self._graphs.cross, len(sources))
        self._graphs.run_encoder(io, sources)
        return found

    def _reserve_cross(self, old: int, lengths: Ids) -> None:
        spec, longest, length = self._spec, int(lengths.max()), self._cross.length
        if not old:
            length = longest
        elif not longest <= length <= 2 * longest:
            length = min(-(-longest // _SOURCE_BLOCK) * _SOURCE_BLOCK, spec.max_source_length)
        rows = _room(self._cross.rows, lengths.size)
        if (rows, length) != (self._cross.rows, self._cross.length):
            self._cross.resize(rows, length, old)
            self._steps.clear()

    def _reserve(self, rows: int, length: int) -> bool:
        """Make room; return whether that reallocated, with zeros after the live rows."""
        limit, capacity = self._spec.max_target_length, self._caches.length
        if self._spec.cache.grows and not length <= capacity <= max(4 * length, FIRST_CAPACITY):
            capacity = FIRST_CAPACITY
            while capacity < length:
                capacity *= 2
        capacity, rows = min(capacity, limit), _room(self._caches.rows, rows)
        if (rows, capacity) == (self._caches.rows, self._caches.length):
            return False
        self._caches.resize(rows, capacity, self.lengths.size)
        self._steps.clear()
        return True

    def _write_mask(self, lengths: Ids) -> None:
        mask = np.zeros((self._cross.rows, self._cross.length), np.bool_)
        mask[: lengths.size] = np.arange(self._cross.length) < lengths[:, None]
        if self._mask is None or tuple(self._mask.shape()) != mask.shape:
            self._mask = self._graphs.device.upload(mask)
            self._steps.clear()
        else:
            self._mask.update_inplace(mask)

    def _prefill(self, prompts: Prompts, first: int) -> RowBuffers:
        pieces = prefill_pieces(prompts, one_by_one=not self._spec.cache.grows)
        shape = pieces[0][0].shape
        caches, step = self._buffers(self._spec.cache, *shape), Step(self._graphs, shape[0], 1, shape[1])
        self._bind(step, caches, len(prompts), len(prompts), first)
        for target_ids, lengths in pieces:
            step.run(target_ids, lengths)
        return caches

    def _run(self, target_ids: Ids, num_candidates: int | None) -> Step:
        self._reserve(self._caches.rows, int(self.lengths.max()) + 1)
        key = self.lengths.size, num_candidates
        step = self._steps.pop(key, None)
        if step is None:
            step = Step(self._graphs, *key)
            self._bind(step, self._caches, key[0], self._source_lengths.size)
            if len(self._steps) == _STEPS:
                del self._steps[next(iter(self._steps))]
        self._steps[key] = step  # last in the order of use
        step.run(target_ids, self.lengths)
        self.lengths = self.lengths + 1
        return step

    def _bind(self, step: Step, caches: RowBuffers, rows: int, sources: int, first: int = 0) -> None:
        assert self._mask is not None
        shape = [sources, self._cross.length]
        address = self._mask.data_ptr() + first * self._cross.length
        step.io.bind_input(SOURCE_MASK, *self._graphs.device.place, np.bool_, shape, address)
        self._cross.bind(step.io.bind_input, self._graphs.cross, sources, first)
        caches.bind(step.io.bind_input, self._graphs.past, rows)
        caches.bind(step.io.bind_output, self._graphs.present, rows)  # updated in place


def _room(have: int, need: int) -> int:
    # Exactly the first need, twice each later one; release memory if it is far too much.
    if need <= have <= 4 * need:
        return have
    return 2 * need if have else need
