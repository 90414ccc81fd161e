"""Where the rows of a batch lie on the device: what moves there, and what only the host's map needs to know."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tfexport.runtime.session import Ids


def bucket(number: int, most: int) -> int:
    """Return the power of two from `number` up, or `most` where that is less."""
    return min(1 << (number - 1).bit_length(), most)


@dataclass(frozen=True)
class CacheCopy:
    """What has to be copied on the device; None where everything stays.

    Attributes:
        sources: lane that each new lane's source comes from, int64 [new width].
        rows: device row that each new device row continues, int64 [new width · new beams].
    """

    sources: Ids | None
    rows: Ids | None


@dataclass(frozen=True)
class BatchLayout:
    """The sources of a batch in the lanes of the device.

    The device decodes `width` lanes of `beams` rows each, whether a source is in
    them or not, so that its shapes stay. When a source leaves, its lane runs on
    and nobody reads it.

    Attributes:
        width: lanes on the device.
        beams: rows of each lane.
        lanes: lane of each source, int64 [batch].
    """

    width: int
    beams: int
    lanes: Ids

    @classmethod
    def of(cls, batch: int, width: int) -> BatchLayout:
        """Put `batch` sources, one row each, into the first of `width` lanes."""
        return cls(width, 1, np.arange(batch))

    @property
    def num_rows(self) -> int:
        """Rows on the device."""
        return self.width * self.beams

    @property
    def rows(self) -> Ids:
        """Device row of each row of the batch, int64 [rows]."""
        return _rows(self.lanes, self.beams)

    def reorder(self, kept: Ids, rows: Ids, width: int) -> tuple[BatchLayout, CacheCopy]:
        """Let row r continue what row rows[r] was.

        Args:
            kept: sources that stay, int64 [new batch], as `check_rows` gives them.
            rows: int64 [new rows].
            width: lanes that are enough for the sources that stay.

        Returns:
            The lanes afterwards and what moves on the device.
        """
        beams, lanes, sources = rows.size // kept.size, self.lanes[kept], np.arange(self.width)
        if width < self.width:  # close up; what is left over goes on with what it held
            sources = np.concatenate((lanes, np.arange(kept.size, width)))
            lanes = np.arange(kept.size)
        order = sources.repeat(beams) * self.beams + np.tile(np.arange(beams) % self.beams, sources.size)
        order[_rows(lanes, beams)] = self.rows[rows]
        return BatchLayout(sources.size, beams, lanes), CacheCopy(_moved(sources), _moved(order))


def _rows(lanes: Ids, beams: int) -> Ids:
    rows: Ids = (lanes[:, None] * beams + np.arange(beams)).ravel()
    return rows


def _moved(order: Ids) -> Ids | None:
    return None if np.array_equal(order, np.arange(order.size)) else order
