"""Where the sources of a batch lie on the device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from tfexport.runtime.session import Ids

# Slot that a source leaves, slot that it takes.
SlotCopy = tuple[int, int]


def bucket(number: int, most: int) -> int:
    """Return the power of two from `number` up, or `most` where that is less."""
    return min(1 << (number - 1).bit_length(), most)


@dataclass(frozen=True)
class BatchLayout:
    """The sources of a batch in the slots of the device.

    The device decodes all slots, whether a source is in them or not, so that its shapes stay. A source that leaves
    changes this map alone: its slot runs on and nobody reads it.

    Attributes:
        size: slots, the padded batch size.
        width: rows of each slot.
        source_len: tokens of a slot's source, padding included.
        slots: slot of each source, int64 [sources].
    """

    size: int
    width: int
    source_len: int
    slots: Ids

    @property
    def num_rows(self) -> int:
        """Rows on the device."""
        return self.size * self.width

    @cached_property
    def rows(self) -> Ids:
        """Device row of each row of the batch, int64 [rows]."""
        rows: Ids = (self.slots[:, None] * self.width + np.arange(self.width)).ravel()
        return rows

    def fit(self, first: int, size: int) -> tuple[BatchLayout, list[SlotCopy]]:
        """Bring all sources into the slots first … size - 1, of which there are enough.

        Returns:
            The layout afterwards and the copies that it takes, in any order: each goes into a slot that is free.
        """
        outside = (self.slots < first) | (self.slots >= size)
        free = np.setdiff1d(np.arange(first, size), self.slots)[: np.count_nonzero(outside)]
        copies = list(zip(self.slots[outside].tolist(), free.tolist(), strict=True))
        slots = self.slots.copy()
        slots[outside] = free
        return replace(self, size=size, slots=slots), copies
