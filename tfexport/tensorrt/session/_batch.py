"""Decode a batch of sources on TensorRT engines."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from tfexport.errors import InputError
from tfexport.runtime.checked import CheckedBatch
from tfexport.runtime.session import (
    Candidates,
    Ids,
    Limit,
    Limits,
    Mask,
    Prompts,
    close_up,
    in_order_of_id,
    prefill_pieces,
)
from tfexport.runtime.sources import Sources
from tfexport.tensorrt.config import decoder_plans
from tfexport.tensorrt.session._cache import BatchLayout, bucket
from tfexport.tensorrt.session._replica import Replica, ReplicaPool
from tfexport.tensorrt.session._resources import EngineSet


class TrtBatch(CheckedBatch):
    """Sources that a replica decodes; it returns to the pool with the batch's garbage.

    Static variant: the number of slots and their source length are powers of two, so that a few CUDA graphs serve all
    batches. Unused parts are masked. When a source leaves, its slot becomes free without work on the device. New
    sources are encoded into the first slots, where the buffers begin; sources in these slots move to free ones. The
    batch is compacted if a quarter of its slots is enough. The caches have the smallest capacity that is enough.

    Concat variant: all rows have one length, so sources start together with prompts of equal length.
    """

    def __init__(self, width: int, engines: EngineSet, limits: Limits, open_pool: Callable[[], ReplicaPool]) -> None:
        """Create an empty batch; `open_pool` raises if the session is closed."""
        assert engines.variant is not None
        super().__init__(engines.spec, width)
        self.can_join = not engines.concatenates
        self._limits, self._open_pool = limits, open_pool
        self._capacities = tuple(decoder_plans(engines.variant, engines.limits).values())
        self._layout = BatchLayout(0, width, 0, 0, np.empty(0, np.int64))
        self._source_mask: Mask = np.empty((0, 0), np.bool_)  # by source, not by slot
        self._replica: Replica | None = None

    def _add(self, sources: Sources, prompts: Prompts) -> None:
        pool = self._open_pool()
        self._check_new(sources, prompts)
        before, count = self._layout, len(sources)
        size, source_len = self._num_slots(before.slots.size + count), self._padded_length(sources.mask)
        moved, copies = before.fit(count, size)
        longest = max(int(self.lengths.max(initial=-1)) + 1, *map(len, prompts))
        moved = replace(moved, source_len=source_len, capacity=self._capacity(longest))
        after = replace(moved, slots=np.concatenate((moved.slots, np.arange(count))))
        mask = np.concatenate([_resized(each, source_len) for each in (self._source_mask, sources.mask)])
        replica = self._replica
        if replica is None:
            self._replica = replica = pool.take((size, self.width, source_len))
            weakref.finalize(self, pool.give_back, replica).atexit = False
        with replica.watched():
            replica.rearrange(before, moved, copies, self._past_len)
            pieces = prefill_pieces(prompts, one_by_one=not self._spec.cache.grows)
            read = [(ids.repeat(self.width, 0), past.repeat(self.width)) for ids, past in pieces]
            replica.read(after, sources.resized(source_len), _by_slot(after, mask), count * self.width, read)
        self._layout, self._source_mask = after, mask
        lengths = np.array([len(prompt) - 1 for prompt in prompts]).repeat(self.width)
        self.lengths = np.concatenate((self.lengths, lengths))

    def _step(self, target_ids: Ids, num_candidates: int) -> Candidates:
        self._open_pool()
        check_limit("target tokens", int(self.lengths.max()) + 1, self._limits.target_length)
        check_limit("candidates", num_candidates, self._limits.candidates)
        replica = self._replica
        assert replica is not None  # there are rows
        with replica.watched():
            self._fit(replica)
            found = replica.decoder.step(self._layout, target_ids, self.lengths, num_candidates)
        self.lengths = self.lengths + 1
        return in_order_of_id(found)

    def _reorder(self, rows: Ids) -> None:
        self._open_pool()
        if np.array_equal(rows, np.arange(rows.size)):
            return
        order = np.arange(self._layout.num_rows)
        order[self._layout.rows] = self._layout.rows[rows]
        if self._replica is not None and (self.can_join or self._past_len):
            with self._replica.watched():
                self._replica.decoder.reorder(self._layout, order, self._past_len)
        self.lengths = self.lengths[rows]

    def _remove(self, sources: Ids) -> None:
        self._open_pool()
        remaining = close_up(self._layout.slots.size, sources)
        self.lengths = self.lengths.reshape(-1, self.width)[remaining].ravel()
        self._layout = replace(self._layout, slots=self._layout.slots[remaining])
        self._source_mask = self._source_mask[remaining]

    @property
    def _past_len(self) -> int:
        # In the concat variant, all rows have one length.
        return int(self.lengths[0]) if self.lengths.size else 0

    def _num_slots(self, num_sources: int) -> int:
        # Keep the number of slots unless it is too small, or a quarter of it is enough.
        most = self._limits.rows.most
        if not self.can_join or not most:
            return num_sources
        size, now = bucket(num_sources, most // self.width), self._layout.size
        return now if self._layout.slots.size and size <= now < 4 * size else size

    def _padded_length(self, new: Mask) -> int:
        longest = max(int(mask.sum(1).max()) for mask in (self._source_mask, new) if mask.size)
        most = self._limits.source_length.most
        if self.can_join and most:
            longest = bucket(longest, most)
        return self._spec.source.fits(longest)

    def _capacity(self, longest: int) -> int:
        # Shrink only if half of the smaller capacity is enough, because rows will grow.
        enough = next(capacity for capacity in self._capacities if capacity >= longest)
        now = self._layout.capacity if self._layout.slots.size else 0
        return now if enough < now and 2 * longest > enough else enough

    def _fit(self, replica: Replica) -> None:
        before = self._layout
        size, longest = self._num_slots(before.slots.size), int(self.lengths.max()) + 1
        capacity = before.capacity if longest <= before.capacity else self._capacity(longest)
        if (size, capacity) == (before.size, before.capacity):
            return
        moved, copies = before.fit(0, size)
        after = replace(moved, capacity=capacity)
        replica.rearrange(before, after, copies, self._past_len)
        if copies:
            replica.encoder.upload_mask(_by_slot(after, self._source_mask))
        self._layout = after

    def _check_new(self, sources: Sources, prompts: Prompts) -> None:
        lengths = [len(prompt) for prompt in prompts]
        if not self.can_join and (self.lengths.size or len(set(lengths)) > 1):
            problem = "others are being decoded" if self.lengths.size else "their prompts are of unequal length"
            raise InputError(
                f"trt: sources cannot be added in the concat variant while {problem}; add all of them at once, "
                "or build engines of the static variant: tfexport trt BUNDLE --variant static --force"
            )
        check_limit("rows", self.lengths.size + len(sources) * self.width, self._limits.rows)
        check_limit(f"source {self._spec.source.unit}", sources.source_len, self._limits.source_length)
        check_limit("target tokens", max(lengths), self._limits.target_length)


def check_limit(what: str, number: int, limit: Limit) -> None:
    if limit.is_below(number):
        raise InputError(
            f"trt: {number} {what}, the limit is {limit.most} for these engines; ask for less{limit.for_more(number)}"
        )


def _resized(mask: Mask, source_len: int) -> Mask:
    # Columns after source_len contain only padding.
    resized = np.zeros((len(mask), source_len), np.bool_)
    resized[:, : mask.shape[1]] = mask[:, :source_len]
    return resized


def _by_slot(layout: BatchLayout, source_mask: Mask) -> Mask:
    mask = np.zeros((layout.size, layout.source_len), np.bool_)
    mask[:, 0] = True  # in a free slot too, because softmax needs a token
    mask[layout.slots] = source_mask
    return mask
