"""The eager model with its logits shaken: what it might as well have said, within rounding."""

from __future__ import annotations

from typing import Any

import numpy as np

from tfexport.runtime.session import Candidates, Floats, Ids, Mask, Session

# Tokens whose order shaking may change lie close together: a few more than asked for are enough.
SPARE = 8


class ShakenSession:
    """A session whose logits are each off by up to `noise`, differently in every row.

    Attributes:
        spec: sizes, limits and token ids.
        backend: "shaken".
        accuracy: that of the inner session.
        max_rows: those of the inner session.
        max_candidates: those of the inner session.
    """

    backend = "shaken"

    def __init__(self, inner: Session, noise: float, rng: np.random.Generator) -> None:
        """Shake what `inner` computes by up to `noise`, drawn from `rng`."""
        self.spec, self.accuracy = inner.spec, inner.accuracy
        self.max_rows, self.max_candidates = inner.max_rows, inner.max_candidates
        self.inner, self.noise, self.rng = inner, noise, rng

    def encode(self, source_ids: Ids, source_mask: Mask) -> Any:
        """Encode a batch; see `Session.encode`."""
        return self.inner.encode(source_ids, source_mask)

    def step(self, state: Any, target_ids: Ids, num_candidates: int) -> Candidates:
        """Run the decoder and shake its candidates; see `Session.step`."""
        found = self.inner.step(state, target_ids, min(num_candidates + SPARE, self.spec.vocab))
        change = self.rng.uniform(-self.noise, self.noise, found.logits.shape)
        logits: Floats = found.logits + change.astype(np.float32)
        order = np.argsort(-logits, axis=1, kind="stable")[:, :num_candidates]
        return Candidates(
            np.take_along_axis(found.token_ids, order, 1), np.take_along_axis(logits, order, 1), found.log_normalizer
        )

    def reorder(self, state: Any, rows: Ids) -> None:
        """Let row r continue what row rows[r] was; see `Session.reorder`."""
        self.inner.reorder(state, rows)

    def hidden_states(self, source_ids: Ids, source_mask: Mask) -> Floats:
        """Encode a batch with an encoder alone, not shaken; see `Session.hidden_states`."""
        return self.inner.hidden_states(source_ids, source_mask)

    def close(self) -> None:
        """Leave the inner session open; it belongs to who made it."""
