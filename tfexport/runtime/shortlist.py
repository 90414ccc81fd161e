"""Lexical shortlists: which tokens a text may have, given its source."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tfexport.contract import ModelSpec
from tfexport.errors import BundleError
from tfexport.runtime.session import Ids, Limits, Mask
from tfexport.runtime.sources import Sources
from tfexport.sources import SOURCE_IDS

# As in Marian, shortlists are filled up to a multiple of it.
_MULTIPLE = 8


@dataclass(frozen=True, eq=False)
class Shortlist:
    """The target tokens that each source token allows, in a table.

    The ids of source token s are `ids[offsets[s] : offsets[s + 1]]`. The last row has those of every text.
    """

    offsets: Ids  # [source_vocab + 2]
    ids: Ids
    vocab: int  # of the target

    @classmethod
    def of(cls, rows: Sequence[Ids], always: Iterable[int], vocab: int) -> Shortlist:
        """Combine the ids of each source token and those of every text."""
        rows = [*rows, np.array(sorted(always), np.int64)]
        return cls(np.cumsum([0, *map(len, rows)]), np.concatenate(rows), vocab)

    @classmethod
    def read(cls, path: Path, spec: ModelSpec) -> Shortlist:
        """Read the table of a bundle; raise `BundleError` if it does not fit the model."""
        try:
            raw = path.read_bytes()
        except OSError as error:
            raise BundleError(f"{path}: cannot be read ({error.strerror}); check its permissions") from error
        numbers = np.frombuffer(raw[: len(raw) // 4 * 4], "<u4").astype(np.int64)
        offsets, ids = np.split(numbers, [spec.source_vocab + 2])
        fits = offsets.size == spec.source_vocab + 2 and offsets[0] == 0 and offsets[-1] == ids.size
        if not fits or (np.diff(offsets) < 0).any() or (ids >= spec.vocab).any():
            raise BundleError(f"{path}: is not a table of shortlists for this model; export the bundle again")
        return cls(offsets, ids, spec.vocab)

    def to_bytes(self) -> bytes:
        """Return the content of the file that `read` reads."""
        return np.concatenate((self.offsets, self.ids)).astype("<u4").tobytes()

    def limits(self, limits: Limits) -> Limits:
        """Return limits with which only tokens of every text end a text."""
        return replace(limits, end_ids=frozenset(self._row(-2).tolist()))

    def masks(self, sources: Sources) -> list[Mask]:
        """Return which tokens each of the sources allows, [vocab]."""
        rows = zip(sources.inputs[SOURCE_IDS], sources.lengths.tolist(), strict=True)
        return [self._mask(ids[:length]) for ids, length in rows]

    def _mask(self, source_ids: Ids) -> Mask:
        mask: Mask = np.zeros(self.vocab, np.bool_)
        for row in (-2, *set(source_ids.tolist())):
            mask[self._row(row)] = True
        if missing := -int(np.count_nonzero(mask)) % _MULTIPLE:
            mask[np.flatnonzero(~mask)[:missing]] = True
        return mask

    def _row(self, row: int) -> Ids:
        return self.ids[self.offsets[row] : self.offsets[row + 1]]
