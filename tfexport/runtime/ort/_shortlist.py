"""Run a contrib decoder whose texts may only have the tokens of their shortlists.

The weights of all tokens that any current source allows are looked up when sources join, and are an input of every
step. A bias of -inf excludes those that only other sources allow, so that a text does not depend on its batch.
"""

from __future__ import annotations

import numpy as np

from tfexport import contract
from tfexport.runtime.ort._binding import Binding, Shape
from tfexport.runtime.ort._contrib import ContribBatch
from tfexport.runtime.ort._device import Array, OrtGraphs
from tfexport.runtime.session import Candidates, Floats, GreedySteps, Ids, Mask, close_up
from tfexport.runtime.sources import Sources


class ShortlistBatch(ContribBatch):
    """Sources being decoded with shortlists."""

    def __init__(self, graphs: OrtGraphs, width: int) -> None:
        super().__init__(graphs, width)
        self._masks: list[Mask] = []  # which tokens each source allows, [vocab]
        self._is_loaded: Mask = np.zeros(graphs.spec.vocab, np.bool_)  # whether the weights of a token are in `_inputs`
        self._bias: Floats = np.empty(0, np.float32)  # of the loaded tokens
        self._inputs: dict[str, Array] = {}  # another object after each change

    def _add_sources(self, sources: Sources) -> None:
        super()._add_sources(sources)
        assert self._graphs.shortlist is not None
        self._masks += self._graphs.shortlist.masks(sources)
        self._choose()

    def _remove(self, sources: Ids) -> None:
        remaining = close_up(self._num_sources, sources)
        super()._remove(sources)
        self._masks = [self._masks[source] for source in remaining.tolist()]
        if self._masks:
            self._choose()

    def _choose(self) -> None:
        """Load the weights of the allowed tokens, unless at most twice as many are loaded."""
        masks = np.array(self._masks)
        needed: Mask = np.logical_or.reduce(masks)
        if (needed > self._is_loaded).any() or 2 * np.count_nonzero(needed) < np.count_nonzero(self._is_loaded):
            ids = np.flatnonzero(needed)
            weights, self._bias = self._graphs.look_up(ids)
            self._is_loaded = needed
            self._inputs = {contract.SHORTLIST_IDS: ids, contract.SHORTLIST_WEIGHTS: weights}
        bias = np.where(masks[:, self._is_loaded], self._bias, np.float32(-np.inf))
        self._inputs = {**self._inputs, contract.SHORTLIST_BIAS: bias}

    def _binding(self, shape: Shape) -> Binding:
        bound = super()._binding(shape)
        bound.bind_shortlist(self._inputs)
        return bound

    def _step(self, target_ids: Ids, num_candidates: int) -> Candidates:
        return self._completed(super()._step(target_ids, min(num_candidates, self._bias.size)), num_candidates)

    def multi_step(self, target_ids: Ids, steps: GreedySteps) -> Candidates:
        """Take several greedy steps, of a batch with one row for each source."""
        found = super().multi_step(
            target_ids, steps._replace(num_candidates=min(steps.num_candidates, self._bias.size))
        )
        return self._completed(found, steps.num_candidates)

    def _score_step(self, target_ids: Ids, next_ids: Ids) -> Candidates:
        every = self._step(target_ids, self._spec.vocab)
        logits = every.logits[every.token_ids == next_ids[:, None]]
        return Candidates(next_ids[:, None], logits[:, None], every.log_normalizer)

    def _completed(self, found: Candidates, num_candidates: int) -> Candidates:
        """Append tokens that no source allows if the others are too few."""
        *shape, count = found.token_ids.shape
        if count == num_candidates:
            return found
        others = np.flatnonzero(~self._is_loaded)[: num_candidates - count]
        shape = [*shape, others.size]
        token_ids = np.concatenate((found.token_ids, np.broadcast_to(others, shape)), -1)
        logits = np.concatenate((found.logits, np.full(shape, -np.inf, np.float32)), -1)
        return Candidates(token_ids, logits, found.log_normalizer)
