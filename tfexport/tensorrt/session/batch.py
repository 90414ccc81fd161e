"""A running batch on engines: its rows, and where they lie on the device."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tfexport.contract import Form, ModelSpec
from tfexport.errors import InputError
from tfexport.runtime.checked import check_prompts, check_rows, check_source, check_sources, check_step
from tfexport.runtime.session import (
    Candidates,
    Ids,
    Limit,
    Limits,
    Mask,
    Prompts,
    close_up,
    in_order_of_id,
)
from tfexport.tensorrt.session.cache import BatchLayout, bucket
from tfexport.tensorrt.session.replica import Replica, ReplicaPool

EMPTY = np.empty(0, np.int64)


class TrtBatch:
    """Sources that a replica decodes; it goes back to the session when the batch is forgotten. See `Batch`.

    Static form: the device decodes a power of two of slots, whose sources have a power of two of tokens, so that a few
    CUDA graphs serve all batches; what is not used is masked. A source that leaves is forgotten by the host alone, and
    its slot is free; new ones come into the first slots, where the buffers begin, and who is there moves to a free one.
    Where a quarter of the slots would do, the sources close up. The caches have the least capacity that engines were
    built for, and a larger one when a row comes to its end.

    Concat form: the rows have one length, so sources begin together, with equally long prompts, and may leave.

    Attributes:
        width: rows of each source.
        can_join: whether sources may join while others are decoded: in the static form.
        lengths: tokens in the cache of every row, int64 [rows].
    """

    def __init__(
        self,
        width: int,
        spec: ModelSpec,
        form: Form,
        limits: Limits,
        capacities: Sequence[int],
        open_pool: Callable[[], ReplicaPool],
    ) -> None:
        """Begin without a source.

        Args:
            width: rows of each source.
            spec: of the model, with its own limits.
            form: of the decoder.
            limits: of the engines; each has a number.
            capacities: that caches can have, ascending.
            open_pool: returns the replicas, or raises where the session is closed.
        """
        self.width, self.can_join, self.lengths = width, form == "static", EMPTY
        self._spec, self._form, self._limits, self._open_pool = spec, form, limits, open_pool
        self._capacities = capacities
        self._layout = BatchLayout(0, width, 0, 0, EMPTY)
        self._source_mask: Mask = np.empty((0, 0), np.bool_)  # of the sources, not of the slots
        self._replica: Replica | None = None

    def add(self, source_ids: Ids, source_mask: Mask, prompts: Prompts) -> None:
        """Encode sources and read their prompts; see `Batch.add`.

        Raises:
            InputError: also where rows are decoded, or prompts are of unequal length, in the concat form.
        """
        pool = self._open_pool()
        self._check_new(source_ids, source_mask, prompts)
        before, count = self._layout, len(source_ids)
        size, source_len = self._num_slots(before.slots.size + count), self._padded_length(source_mask)
        moved, copies = before.fit(count, size)
        longest = max(int(self.lengths.max(initial=-1)) + 1, *map(len, prompts))
        moved = replace(moved, source_len=source_len, capacity=self._capacity(longest))
        after = replace(moved, slots=np.concatenate((moved.slots, np.arange(count))))
        mask = np.concatenate([_resized(each, source_len) for each in (self._source_mask, source_mask)])
        replica = self._replica
        if replica is None:
            self._replica = replica = pool.take((size, self.width, source_len))
            weakref.finalize(self, pool.give_back, replica).atexit = False
        with replica.watched():
            replica.add(before, moved, copies, self._past_len)
            read = _all_but_last(prompts).repeat(self.width, axis=0)
            replica.read(after, _resized(source_ids, source_len), _by_slot(after, mask), read)
        self._layout, self._source_mask = after, mask
        lengths = np.array([len(prompt) - 1 for prompt in prompts]).repeat(self.width)
        self.lengths = np.concatenate((self.lengths, lengths))

    def step(self, target_ids: Ids, num_candidates: int) -> Candidates:
        """Read one token of every row; see `Batch.step`."""
        self._open_pool()
        check_step(self._spec, self.lengths, target_ids, num_candidates)
        check_limit("target tokens", int(self.lengths.max()) + 1, self._limits.target_length)
        check_limit("candidates", num_candidates, self._limits.candidates)
        replica = self._replica
        assert replica is not None  # there are rows
        with replica.watched():
            self._fit(replica)
            found = replica.step(self._layout, target_ids, self.lengths, num_candidates)
        self.lengths = self.lengths + 1
        return in_order_of_id(found)

    def reorder(self, rows: Ids) -> None:
        """Let row r continue what row rows[r] was; see `Batch.reorder`."""
        self._open_pool()
        check_rows(self.lengths, self.width, rows)
        if np.array_equal(rows, np.arange(rows.size)):
            return
        order = np.arange(self._layout.num_rows)
        order[self._layout.rows] = self._layout.rows[rows]
        if self._replica is not None and (self._form == "static" or self._past_len):
            with self._replica.watched():
                self._replica.reorder(self._layout, order, self._past_len)
        self.lengths = self.lengths[rows]

    def remove(self, sources: Ids) -> None:
        """Let sources leave, which changes nothing on the device; see `Batch.remove`."""
        self._open_pool()
        check_sources(self._layout.slots.size, sources)
        kept = close_up(self._layout.slots.size, sources)
        self.lengths = self.lengths.reshape(-1, self.width)[kept].ravel()
        self._layout = replace(self._layout, slots=self._layout.slots[kept])
        self._source_mask = self._source_mask[kept]

    @property
    def _past_len(self) -> int:
        """Tokens in the cache of every row, in the concat form."""
        return int(self.lengths[0]) if self.lengths.size else 0

    def _num_slots(self, num_sources: int) -> int:
        """Return how many slots there must be: those that there are, unless they are too few or a quarter would do."""
        most = self._limits.rows.most
        if self._form == "concat" or not most:
            return num_sources
        size, now = bucket(num_sources, most // self.width), self._layout.size
        return now if self._layout.slots.size and size <= now < 4 * size else size

    def _padded_length(self, new: Mask) -> int:
        """Return how many source tokens a slot must have for the longest source, the new ones included."""
        longest = max(int(mask.sum(1).max()) for mask in (self._source_mask, new) if mask.size)
        most = self._limits.source_length.most
        return bucket(longest, most) if self._form == "static" and most else longest

    def _capacity(self, longest: int) -> int:
        """Return the capacity for rows of up to `longest` tokens; one less than now only where half of it is enough."""
        enough = next(capacity for capacity in self._capacities if capacity >= longest)
        now = self._layout.capacity if self._layout.slots.size else 0
        return now if enough < now and 2 * longest > enough else enough

    def _fit(self, replica: Replica) -> None:
        """Close up where far fewer slots are enough, and make the caches larger where a row is at their end."""
        before = self._layout
        size, longest = self._num_slots(before.slots.size), int(self.lengths.max()) + 1
        capacity = before.capacity if longest <= before.capacity else self._capacity(longest)
        if (size, capacity) == (before.size, before.capacity):
            return
        moved, copies = before.fit(0, size)
        after = replace(moved, capacity=capacity)
        replica.fit(before, after, copies, _by_slot(after, self._source_mask), self._past_len)
        self._layout = after

    def _check_new(self, source_ids: Ids, source_mask: Mask, prompts: Prompts) -> None:
        check_source(self._spec, source_ids, source_mask)
        check_prompts(self._spec, len(source_ids), prompts)
        lengths = [len(prompt) for prompt in prompts]
        if self._form == "concat" and (self.lengths.size or len(set(lengths)) > 1):
            problem = "others are being decoded" if self.lengths.size else "their prompts are of unequal length"
            raise InputError(
                f"trt: sources cannot be added in the concat form while {problem}; begin with all of them, "
                "or build engines of the static form: tfexport trt BUNDLE --form static --force"
            )
        for what, number, limit in (
            ("rows", self.lengths.size + len(source_ids) * self.width, self._limits.rows),
            ("source tokens", source_ids.shape[1], self._limits.source_length),
            ("target tokens", max(lengths), self._limits.target_length),
        ):
            check_limit(what, number, limit)


def check_limit(what: str, number: int, limit: Limit) -> None:
    """Refuse more than the engines take.

    Raises:
        InputError: says how to get more.
    """
    if limit.is_below(number):
        raise InputError(
            f"trt: {number} {what}, the limit is {limit.most} for these engines; ask for less{limit.for_more(number)}"
        )


def _resized(array: NDArray[Any], source_len: int) -> NDArray[Any]:
    """Pad sources, or leave out columns that are padding alone: [sources, source_len]."""
    resized = np.zeros((len(array), source_len), array.dtype)
    resized[:, : array.shape[1]] = array[:, :source_len]
    return resized


def _by_slot(layout: BatchLayout, source_mask: Mask) -> Mask:
    """Lay the masks of the sources out, [size, source_len]; a free slot reads one token, since softmax needs one."""
    mask = np.zeros((layout.size, layout.source_len), np.bool_)
    mask[:, 0] = True
    mask[layout.slots] = source_mask
    return mask


def _all_but_last(prompts: Prompts) -> Ids:
    """Stack what is read of prompts, int64 [prompts, longest - 1].

    A short one goes on with its last token. What that writes lies behind the end of its row, where later tokens go.
    """
    longest = max(map(len, prompts)) - 1
    rows = [[*prompt, *[prompt[-1]] * longest][:longest] for prompt in prompts]
    return np.array(rows, np.int64).reshape(len(rows), longest)
