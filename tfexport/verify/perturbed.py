"""The eager model with its logits perturbed: what it might as well have said, within rounding."""

from __future__ import annotations

import numpy as np

from tfexport.runtime.session import Batch, Candidates, Floats, Ids, Mask, Prompts, Session

# Tokens whose order the noise may change lie close together: a few more than asked for are enough.
SPARE = 8


class PerturbedSession:
    """A session whose logits are each off by up to `noise`, differently in every row.

    Attributes:
        spec: sizes, limits and token ids.
        backend: "perturbed".
        accuracy: that of the inner session.
        limits: those of the inner session.
    """

    backend = "perturbed"

    def __init__(self, inner: Session, noise: float, rng: np.random.Generator) -> None:
        """Perturb what `inner` computes by up to `noise`, drawn from `rng`."""
        self.spec, self.accuracy, self.limits = inner.spec, inner.accuracy, inner.limits
        self._inner, self._noise, self._rng = inner, noise, rng

    def batch(self, width: int = 1) -> PerturbedBatch:
        """Return an empty batch; see `Session.batch`."""
        return PerturbedBatch(self._inner.batch(width), self._noise, self._rng, self.spec.vocab)

    def hidden_states(self, source_ids: Ids, source_mask: Mask) -> Floats:
        """Encode with an encoder alone, unperturbed; see `Session.hidden_states`."""
        return self._inner.hidden_states(source_ids, source_mask)

    def close(self) -> None:
        """Leave the inner session open; it belongs to who made it."""


class PerturbedBatch:
    """A batch of another session with noise on its logits; see `Batch`."""

    def __init__(self, inner: Batch, noise: float, rng: np.random.Generator, vocab: int) -> None:
        """Wrap an empty batch."""
        self.width, self.can_join = inner.width, inner.can_join
        self._inner, self._noise, self._rng, self._vocab = inner, noise, rng, vocab

    @property
    def lengths(self) -> Ids:
        """Tokens in the cache of every row; see `Batch`."""
        return self._inner.lengths

    def add(self, source_ids: Ids, source_mask: Mask, prompts: Prompts) -> None:
        """Encode sources; see `Batch.add`."""
        self._inner.add(source_ids, source_mask, prompts)

    def step(self, target_ids: Ids, num_candidates: int) -> Candidates:
        """Run the decoder and perturb its candidates; see `Batch.step`."""
        found = self._inner.step(target_ids, min(num_candidates + SPARE, self._vocab))
        change = self._rng.uniform(-self._noise, self._noise, found.logits.shape)
        logits: Floats = found.logits + change.astype(np.float32)
        order = np.argsort(-logits, axis=1, kind="stable")[:, :num_candidates]
        return Candidates(
            np.take_along_axis(found.token_ids, order, 1), np.take_along_axis(logits, order, 1), found.log_normalizer
        )

    def reorder(self, rows: Ids) -> None:
        """Let rows continue others; see `Batch.reorder`."""
        self._inner.reorder(rows)

    def remove(self, sources: Ids) -> None:
        """Let sources leave; see `Batch.remove`."""
        self._inner.remove(sources)
