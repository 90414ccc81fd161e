"""The tokens that end a text."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from tfexport.runtime.session import Ids, Mask


class Ends:
    """One or more tokens, any of which ends a text.

    Attributes:
        ids: each once, ascending.
    """

    def __init__(self, ids: Iterable[int]) -> None:
        """Take at least one id."""
        self.ids = tuple(sorted(set(ids)))
        self._several: Ids | None = np.array(self.ids) if len(self.ids) > 1 else None

    def among(self, token_ids: Ids) -> Mask:
        """Say which of `token_ids`, of any shape, end a text."""
        found: Mask = token_ids == self.ids[0] if self._several is None else np.isin(token_ids, self._several)
        return found
