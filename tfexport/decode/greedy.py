"""One token at a time: the best one, or one drawn at random."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tfexport.contract import ModelSpec
from tfexport.decode.bias import PrefixBias
from tfexport.decode.filters import Filters
from tfexport.decode.history import History
from tfexport.decode.request import Request
from tfexport.decode.result import Hypothesis, finish_reason
from tfexport.decode.sample import Sampler
from tfexport.decode.search import (
    Outcome,
    Taken,
    is_broken,
    is_stopped,
    log_probs_of,
    not_a_number,
    nothing_left,
    repaired,
)
from tfexport.decode.stops import Stops
from tfexport.errors import BackendError
from tfexport.generation import DecodeConfig
from tfexport.runtime.session import Candidates, Ids, Mask


class GreedySearch:
    """Goes on with the best token of each row, or draws one; see `Search`."""

    width = 1

    def __init__(self, config: DecodeConfig, spec: ModelSpec) -> None:
        """Begin without a source.

        Args:
            config: what the requests have in common; num_beams is 1.
            spec: of the model.
        """
        self.requests: list[Request] = []
        self.history = History(spec.vocab)
        self._filters = Filters(config, spec)
        self.ends = self._filters.ends
        self.stop_ids = frozenset(self.ends.ids) | self._filters.suppressed
        self._stops, self._is_stopped = Stops(config), np.empty(0, np.bool_)
        self._sampler = Sampler(config, spec.vocab) if config.do_sample else None
        self._bias = PrefixBias(config.prefix_bias_beta, spec.vocab)
        self._num_new: Ids = np.empty(0, np.int64)
        self._limits: Ids = np.empty(0, np.int64)
        self._totals = np.empty(0)  # Σ log p in float64
        self._failed: dict[int, Outcome] = {}

    def add(self, requests: Sequence[Request]) -> None:
        """Begin to search for more; see `Search.add`."""
        self.requests += requests
        self.history.add(request.prompt for request in requests)
        self._num_new = np.concatenate((self._num_new, [request.num_forced for request in requests]))
        self._limits = np.concatenate((self._limits, [request.max_new_tokens for request in requests]))
        self._totals = np.concatenate((self._totals, [request.log_prob for request in requests]))
        self._filters.add(request.source_ids for request in requests)
        self._bias.add(request.biased_prefix for request in requests)
        self._stops.add(len(requests))
        if self._sampler:
            self._sampler.add(requests)

    def num_candidates(self) -> int:
        """Say how many candidates it wants; see `Search.num_candidates`."""
        wanted = self._filters.num_candidates(self._sampler.wanted if self._sampler else 1, self.history)
        return self._bias.num_candidates(wanted, self.history)

    def take(self, found: Candidates) -> Taken:
        """Lengthen each row by one token; see `Search.take`."""
        broken = is_broken(found)
        if broken is not None:
            self._fail(broken, self._num_new)
            found = repaired(found, broken)
        token_ids, log_probs = found.token_ids, log_probs_of(found)
        if self._filters.are_set:
            normalizer = found.log_normalizer[:, None]
            token_ids, scores = self._filters.apply(self.history, self._num_new, token_ids, found.logits)
            log_probs = scores - normalizer
        token_ids, log_probs = self._bias.apply(token_ids, log_probs)
        if self._filters.forced:
            token_ids, log_probs = self._filters.force(self._limits - self._num_new, token_ids, log_probs)
        best = log_probs[:, 0].copy()  # a view would keep all candidates of the step
        # `in` a list is the fastest search of a few numbers.
        if -np.inf in best.tolist():
            for row in np.flatnonzero(best == -np.inf).tolist():
                self._failed.setdefault(row, nothing_left(self.requests[row], int(self._num_new[row])))
            log_probs = np.where(best[:, None] == -np.inf, np.float32(0), log_probs)
        if self._sampler:
            columns, chosen = self._sampler.draw(log_probs)
            new_ids = token_ids[np.arange(best.size), columns]
        else:
            new_ids, chosen = token_ids[:, 0].copy(), best
        self._totals += chosen
        self._num_new += 1
        self.history.append(new_ids)
        ended = self.ends.among(new_ids) | (self._num_new == self._limits)
        if self._stops.are_set:
            self._is_stopped = self._stopped()
            ended |= self._is_stopped | self._stops.are_late()
        return Taken(None, self._outcomes(ended))

    @property
    def follows_best(self) -> bool:
        """Whether each row goes on with its best token; see `Search`."""
        return self._sampler is None and not self._bias.is_followed and self._filters.leave_best

    def steps_ahead(self) -> int:
        """Say how many steps may be taken at once; see `Search.steps_ahead`."""
        if not self.follows_best or self._stops.are_set:
            return 1
        return int((self._limits - self._num_new).min())

    def follow(self, found: Candidates) -> None:
        """Take steps in which each row went on with its best token; see `Search.follow`."""
        token_ids, log_probs = found.token_ids[:, :, 0], found.logits[:, :, 0] - found.log_normalizer
        finite = np.isfinite(log_probs)
        if not finite.all():
            self._fail(~finite.all(0), self._num_new + finite.argmin(0))
        self.history.extend(token_ids)
        # Step after step, as `take` adds them.
        self._totals = np.concatenate((self._totals[None], log_probs)).cumsum(0)[-1]
        self._num_new += len(token_ids)

    def remove(self, kept: Ids) -> None:
        """Go on with some sources; see `Search.remove`."""
        self.requests = [self.requests[place] for place in kept.tolist()]
        self.history.keep(kept)
        self._num_new, self._limits, self._totals = self._num_new[kept], self._limits[kept], self._totals[kept]
        self._filters.keep(kept)
        self._bias.keep(kept)
        self._stops.keep(kept)
        if self._sampler:
            self._sampler.keep(kept)

    def _fail(self, broken: Mask, num_new: Ids) -> None:
        for row in np.flatnonzero(broken).tolist():
            self._failed.setdefault(row, not_a_number(self.requests[row], int(num_new[row])))

    def _stopped(self) -> Mask:
        """Say which rows have completed a stop string, bool [rows]."""
        stopped: Mask = np.zeros(len(self.requests), np.bool_)
        for row, request in enumerate(self.requests):
            try:
                stopped[row] = is_stopped(self._stops, request, self.history.row(row)[1:])
            except BackendError as error:
                self._failed.setdefault(row, error)
        return stopped

    def _outcomes(self, ended: Mask) -> dict[int, Outcome]:
        done: dict[int, Outcome] = {}
        if np.count_nonzero(ended):
            done = {row: [self._hypothesis(row)] for row in np.flatnonzero(ended).tolist()}
        if self._failed:
            done |= self._failed
            self._failed = {}
        return done

    def _hypothesis(self, row: int) -> Hypothesis:
        ids, log_prob = self.history.row(row), float(self._totals[row])
        at_stop = self._stops.are_set and bool(self._is_stopped[row])
        is_full = bool(self._num_new[row] == self._limits[row])
        return Hypothesis(
            token_ids=tuple(ids[1:]),
            score=log_prob / int(self._num_new[row]),
            log_prob=log_prob,
            finish_reason=finish_reason(ids[-1], self.ends, is_stopped=at_stop, is_full=is_full),
        )
