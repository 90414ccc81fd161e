"""Run greedy search and reproducible sampling, one token at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tfexport.contract import ModelSpec
from tfexport.decode._search import Outcome, Search, is_any, is_broken, nan_error, no_token_error, repaired
from tfexport.decode.request import Request
from tfexport.decode.result import Hypothesis, finish_reason
from tfexport.errors import BackendError
from tfexport.generation import SAMPLING_OPTIONS, DecodeConfig
from tfexport.runtime.session import ONE, Candidates, Floats, Ids, Mask

Probabilities = NDArray[np.float64]


class Sampler:
    """Draw tokens with temperature, top_k and the filters of sampling.

    Each row has its own generator and takes one number per token, so a draw does not depend on other rows.
    """

    def __init__(self, config: DecodeConfig, vocab: int) -> None:
        self.num_candidates = config.top_k or vocab
        self._config = config
        self._generators: list[np.random.Generator] = []

    def add(self, requests: Sequence[Request]) -> None:
        for request in requests:
            place = request.text if request.place is None else request.place
            self._generators.append(np.random.default_rng((request.config.seed, place, request.sample)))

    def keep(self, rows: Ids) -> None:
        self._generators = [self._generators[row] for row in rows.tolist()]

    def draw(self, log_probs: Floats) -> tuple[Ids, Floats]:
        """Draw a candidate for each row; return its column and log-probability."""
        probabilities = distribution(log_probs[:, : self.num_candidates], self._config)
        cumulative = probabilities.cumsum(1)
        draws = np.array([generator.random() for generator in self._generators])
        columns: Ids = (cumulative > draws[:, None] * cumulative[:, -1:]).argmax(1)
        return columns, np.log(probabilities[np.arange(len(columns)), columns]).astype(np.float32)


def distribution(log_probs: Floats, config: DecodeConfig) -> Probabilities:
    """Return the probabilities that samples are drawn with, [rows, num_candidates].

    `log_probs` are those of the top_k best candidates, best first. The options apply as in Hugging Face `generate`.
    """
    scaled = log_probs.astype(np.float64) / config.temperature
    weights = np.exp(scaled - scaled[:, :1])
    probabilities: Probabilities = weights / weights.sum(1, keepdims=True)
    for name in SAMPLING_OPTIONS[2:]:
        if (value := getattr(config, name)) != getattr(DecodeConfig, name):
            probabilities = np.where(_dropped(name, value, probabilities), 0, probabilities)
            probabilities /= probabilities.sum(1, keepdims=True)
    return probabilities


def _dropped(name: str, value: float, probabilities: Probabilities) -> Any:
    """Return which tokens, best first, a sampling option drops."""
    if name == "top_p":
        dropped = probabilities[:, ::-1].cumsum(1)[:, ::-1] <= 1 - value
        dropped[:, 0] = False
        return dropped
    if name == "min_p":
        return probabilities < value * probabilities[:, :1]
    with np.errstate(divide="ignore", invalid="ignore"):  # of tokens that are dropped already
        surprise = -np.log(probabilities)
        entropy = np.nansum(probabilities * surprise, 1, keepdims=True)
    if name == "typical_p":
        distance = abs(surprise - entropy)
        order = distance.argsort(1, kind="stable")
        num = (np.take_along_axis(probabilities, order, 1).cumsum(1) < value).sum(1, keepdims=True)
        last = np.take_along_axis(order, num.clip(max=order.shape[1] - 1), 1)
        return distance > np.take_along_axis(distance, last, 1)
    least = value if name == "epsilon_cutoff" else np.minimum(value, value**0.5 * np.exp(-entropy))
    return (probabilities < least) & (probabilities < probabilities.max(1, keepdims=True))


class GreedySearch(Search):
    """Greedy search or sampling, with one row per source."""

    def __init__(self, config: DecodeConfig, spec: ModelSpec) -> None:
        super().__init__(config, spec)
        self._sampler = Sampler(config, spec.vocab) if config.do_sample else None
        self._is_stopped = np.empty(0, np.bool_)
        self._totals = np.empty(0)  # Σ log p in float64
        self._failed: dict[int, Outcome] = {}

    def add(self, requests: Sequence[Request]) -> None:
        super().add(requests)
        self._totals = np.concatenate((self._totals, [request.log_prob for request in requests]))
        if self._sampler:
            self._sampler.add(requests)

    def keep(self, sources: Ids) -> None:
        super().keep(sources)
        self._totals = self._totals[sources]
        if self._sampler:
            self._sampler.keep(sources)

    def num_candidates(self) -> int:
        return self._processors.num_candidates(self._sampler.num_candidates if self._sampler else 1, self.history)

    def take(self, found: Candidates) -> tuple[Ids | None, dict[int, Outcome]]:
        broken = is_broken(found)
        if broken is not None:
            self._fail(broken, self._num_new)
            found = repaired(found, broken)
        token_ids, log_probs = self._processors.apply(found, self.history, self._num_new, self._limits)
        best = log_probs[:, 0].copy()  # a view would keep all candidates of the step alive
        # A list is the fastest to search for a few numbers.
        if -np.inf in best.tolist():
            for row in np.flatnonzero(best == -np.inf).tolist():
                self._failed.setdefault(row, no_token_error(self.requests[row], int(self._num_new[row])))
            log_probs = np.where(best[:, None] == -np.inf, np.float32(0), log_probs)
        if self._sampler:
            columns, chosen = self._sampler.draw(log_probs)
            new_ids = token_ids[np.arange(best.size), columns]
        else:
            new_ids, chosen = token_ids[:, 0].copy(), best
        self._totals += chosen
        self._num_new = self._num_new + ONE
        self.history.append(new_ids)
        ended = self._ends.among(new_ids) | (self._num_new == self._limits)
        if self._stops.are_set:
            self._is_stopped = self._stopped()
            ended |= self._is_stopped | self._stops.are_late()
        return None, self._outcomes(ended)

    @property
    def follows_best(self) -> bool:
        return self._sampler is None and self._processors.leave_best

    def steps_ahead(self) -> int:
        if not self.follows_best or self._stops.are_set:
            return 1
        return int((self._limits - self._num_new).min())

    def follow(self, found: Candidates) -> None:
        token_ids, log_probs = found.token_ids[:, :, 0], found.logits[:, :, 0] - found.log_normalizer
        finite = np.isfinite(log_probs)
        if not finite.all():
            self._fail(~finite.all(0), self._num_new + finite.argmin(0))
        self.history.extend(token_ids)
        # Add step by step, as `take` does, for equal rounding.
        self._totals = np.concatenate((self._totals[None], log_probs)).cumsum(0)[-1]
        self._num_new += len(token_ids)

    def _fail(self, broken: Mask, num_new: Ids) -> None:
        for row in np.flatnonzero(broken).tolist():
            self._failed.setdefault(row, nan_error(self.requests[row], int(num_new[row])))

    def _stopped(self) -> Mask:
        stopped: Mask = np.zeros(len(self.requests), np.bool_)
        for row, request in enumerate(self.requests):
            try:
                stopped[row] = self._stops.is_stopped(request, self.history.row(row)[1:])
            except BackendError as error:
                self._failed.setdefault(row, error)
        return stopped

    def _outcomes(self, ended: Mask) -> dict[int, Outcome]:
        done: dict[int, Outcome] = {}
        if is_any(ended):
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
            finish_reason=finish_reason(ids[-1], self._ends, is_stopped=at_stop, is_full=is_full),
        )
