"""Run greedy search and reproducible sampling, one token at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tfexport._io.phases import phase
from tfexport.contract import ModelSpec
from tfexport.decode._history import History, Tokens
from tfexport.decode._processors import Processors, kind_of, sampling_filters
from tfexport.decode._search import Outcome, Search, is_any, is_broken, nan_error, no_token_error, repaired
from tfexport.decode.request import Request
from tfexport.decode.result import Hypothesis, finish_reason
from tfexport.decode.stops import is_stopped
from tfexport.errors import BackendError
from tfexport.generation import DecodeConfig
from tfexport.runtime.session import ONE, Candidates, Floats, Ids, Mask, best_columns

Probabilities = NDArray[np.float64]


class Sampler:
    """Draw tokens with temperature, top_k and the filters of sampling.

    Each row has its own generator and takes one number per token, so a draw does not depend on other rows.
    """

    def __init__(self, config: DecodeConfig, vocab: int) -> None:
        self._names, self._vocab = sampling_filters(config), vocab
        self._requests: list[Request] = []
        self._generators: list[np.random.Generator] = []

    def add(self, requests: Sequence[Request]) -> None:
        self._requests += requests
        for request in requests:
            place = request.text if request.place is None else request.place
            self._generators.append(np.random.default_rng((request.config.seed, place, request.sample)))
        self._read()

    def keep(self, rows: Ids) -> None:
        self._requests = [self._requests[row] for row in rows.tolist()]
        self._generators = [self._generators[row] for row in rows.tolist()]
        self._read()

    def _read(self) -> None:
        configs = [request.config for request in self._requests]
        top_k = [config.top_k or self._vocab for config in configs]
        self.num_candidates = max(top_k, default=1)
        self._top_k = np.array(top_k)[:, None] if len({*top_k}) > 1 else None
        self._temperature = np.array([config.temperature for config in configs])[:, None]
        self._filters = {name: np.array([getattr(one, name) for one in configs])[:, None] for name in self._names}

    def draw(self, log_probs: Floats) -> tuple[Ids, Floats]:
        """Draw a candidate for each row; return its column and log-probability."""
        log_probs = log_probs[:, : self.num_candidates]
        if self._top_k is not None:
            log_probs = np.where(np.arange(log_probs.shape[1]) < self._top_k, log_probs, np.float32(-np.inf))
        probabilities = distribution(log_probs, self._temperature, self._filters)
        cumulative = probabilities.cumsum(1)
        draws = np.array([generator.random() for generator in self._generators])
        columns: Ids = (cumulative > draws[:, None] * cumulative[:, -1:]).argmax(1)
        return columns, np.log(probabilities[np.arange(len(columns)), columns]).astype(np.float32)


def distribution(log_probs: Floats, temperature: Any, filters: Mapping[str, Any]) -> Probabilities:
    """Return the probabilities that samples are drawn with, [rows, num_candidates].

    `log_probs` are those of the top_k best candidates, best first. `temperature` and the values of `filters`, by name,
    are numbers or [rows, 1]; the filters apply as in Hugging Face `generate`.
    """
    scaled = log_probs.astype(np.float64) / temperature
    weights = np.exp(scaled - scaled[:, :1])
    probabilities: Probabilities = weights / weights.sum(1, keepdims=True)
    for name, value in filters.items():
        probabilities = np.where(_dropped(name, value, probabilities), 0, probabilities)
        probabilities /= probabilities.sum(1, keepdims=True)
    return probabilities


def _dropped(name: str, value: Any, probabilities: Probabilities) -> Any:
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


class _Kind:
    """Rows with the same kinds of processors, and whether they sample."""

    def __init__(self, config: DecodeConfig, spec: ModelSpec) -> None:
        self.rows: Ids = np.empty(0, np.int64)  # of the search
        self.processors = Processors(config, spec)
        self.sampler = Sampler(config, spec.vocab) if config.do_sample else None
        self._num_candidates = 1
        self._history: History | Tokens | None = None  # after the last `num_candidates`

    def add(self, requests: Sequence[Request], rows: Ids) -> None:
        self.rows = np.concatenate((self.rows, rows))
        self.processors.add(requests)
        if self.sampler:
            self.sampler.add(requests)

    def keep(self, order: Ids, rows: Ids) -> None:
        """Keep some rows, in this order; they are then `rows` of the search."""
        self.rows = rows
        self.processors.keep(order)
        if self.sampler:
            self.sampler.keep(order)

    def num_candidates(self, history: History) -> int:
        texts: History | Tokens = history
        if self.processors:
            texts = self._history = history if self.rows.size == history.lengths.size else history.of(self.rows)
        wanted = self.sampler.num_candidates if self.sampler else 1
        self._num_candidates = self.processors.num_candidates(wanted, texts)
        return self._num_candidates

    def choose(self, found: Candidates, num_new: Ids, limits: Ids) -> tuple[Ids, Floats]:
        """Return the next token of each row and its log-probability.

        It is -inf if every token is banned.
        """
        if self.rows.size < num_new.size:
            rows, count = self.rows, self._num_candidates  # `take` is the fastest for a few rows
            some = (found.token_ids[:, :count].take(rows, 0), found.logits[:, :count].take(rows, 0))
            found = Candidates(*some, found.log_normalizer.take(rows))
        if self._history is None:
            token_ids, log_probs = found.token_ids, found.log_probs
        else:
            numbers = num_new.take(self.rows), limits.take(self.rows)
            token_ids, log_probs = self.processors.apply(found, self._history, *numbers)
        best = log_probs[:, 0].copy()  # a view would keep all candidates of the step alive
        if self.sampler is None:
            return token_ids[:, 0].copy(), best
        is_none = (best == -np.inf)[:, None]
        columns, chosen = self.sampler.draw(np.where(is_none, np.float32(0), log_probs))
        return token_ids[np.arange(best.size), columns], np.where(is_none[:, 0], best, chosen)


class GreedySearch(Search):
    """Greedy search and sampling, with one row per source.

    Rows may have different options.
    """

    width = 1

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self._kinds: dict[object, _Kind] = {}
        self._is_stopped = np.empty(0, np.bool_)
        self._totals = np.empty(0)  # Σ log p in float64
        self._failed: dict[int, Outcome] = {}

    def add(self, requests: Sequence[Request]) -> None:
        first, by_kind, newest, key = len(self.requests), dict[object, list[int]](), None, None
        super().add(requests)
        self._totals = np.concatenate((self._totals, [request.log_prob for request in requests]))
        for number, request in enumerate(requests):
            if request.config is not newest:  # the requests of a call share one
                newest, key = request.config, kind_of(request.config)
            by_kind.setdefault(key, []).append(number)
        for key, numbers in by_kind.items():
            if is_new := key not in self._kinds:
                self._kinds[key] = _Kind(requests[numbers[0]].config, self._spec)
            self._kinds[key].add([requests[number] for number in numbers], first + np.array(numbers))
            if is_new:
                self._sort()

    def keep(self, sources: Ids) -> None:
        moved_to = np.full(len(self.requests), -1)
        moved_to[sources] = np.arange(sources.size)
        super().keep(sources)
        self._totals = self._totals[sources]
        if len(self._kinds) == 1:
            (kind,) = self._kinds.values()
            kind.keep(sources, np.arange(sources.size))
            return
        for kind in self._kinds.values():
            moved = moved_to[kind.rows]
            order = moved.argsort()[np.count_nonzero(moved < 0) :]
            kind.keep(order, moved[order])
        if any(not kind.rows.size for kind in self._kinds.values()):
            self._kinds = {key: kind for key, kind in self._kinds.items() if kind.rows.size}
            self._sort()

    def _sort(self) -> None:
        """Find out which kinds choose tokens, and whether all have the same end tokens."""
        kinds = list(self._kinds.values())
        self._ends = kinds[0].processors.ends if len({kind.processors.ends.ids for kind in kinds}) == 1 else None
        self._choosing = [kind for kind in kinds if kind.sampler or kind.processors]
        self._samples = any(kind.sampler for kind in kinds)

    @property
    def stop_ids(self) -> frozenset[int]:
        return frozenset().union(*(kind.processors.stop_ids for kind in self._kinds.values()))

    def num_candidates(self) -> int:
        return max((kind.num_candidates(self.history) for kind in self._choosing), default=1)

    @phase("select")
    def take(self, found: Candidates) -> tuple[Ids | None, dict[int, Outcome]]:
        broken = is_broken(found)
        if broken is not None:
            self._fail(broken, self._num_new)
            found = repaired(found, broken)
        new_ids, chosen = self._choose(found)
        # A list is the fastest to search for a few numbers.
        if -np.inf in chosen.tolist():
            for row in np.flatnonzero(chosen == -np.inf).tolist():
                self._failed.setdefault(row, no_token_error(self.requests[row], int(self._num_new[row])))
        self._totals += chosen
        self._num_new = self._num_new + ONE
        self.history.append(new_ids)
        ended = self._num_new == self._limits
        if self._ends:
            ended |= self._ends.among(new_ids)
        else:
            for kind in self._kinds.values():
                ended[kind.rows] |= kind.processors.ends.among(new_ids[kind.rows])
        if self._has_stops:
            self._is_stopped = self._stopped()
            ended |= self._is_stopped | self._deadlines.are_late()
        return None, self._outcomes(ended)

    def _choose(self, found: Candidates) -> tuple[Ids, Floats]:
        if len(self._kinds) == len(self._choosing) == 1:
            return self._choosing[0].choose(found, self._num_new, self._limits)
        new_ids, chosen = found.token_ids[:, 0].copy(), found.logits[:, 0] - found.log_normalizer
        for kind in self._choosing:
            new_ids[kind.rows], chosen[kind.rows] = kind.choose(found, self._num_new, self._limits)
        return new_ids, chosen

    @property
    def follows_best(self) -> bool:
        return not self._samples and all(kind.processors.leave_best for kind in self._choosing)

    @property
    def needs_scores(self) -> bool:
        return not self.follows_best or any(request.config.return_scores for request in self.requests)

    def steps_ahead(self) -> int:
        self.banned_ids = frozenset()
        if not self.follows_best or self._has_stops:
            return 1
        steps = int((self._limits - self._num_new).min())
        if len(self._kinds) == len(self._choosing) == 1:
            processors = self._choosing[0].processors
            before = processors.steps_before_end(self.history, self._num_new)
            if before is not None and (short := int(before.min())) > 0:
                self.banned_ids, steps = frozenset(processors.ends.ids), min(steps, short)
        return steps

    @phase("select")
    def follow(self, found: Candidates) -> None:
        token_ids, logits = found.token_ids[:, :, 0], found.logits[:, :, 0]
        if self.banned_ids and (columns := best_columns(found.token_ids, self.banned_ids)).any():
            columns = columns[:, :, None]
            token_ids = np.take_along_axis(found.token_ids, columns, 2)[:, :, 0]
            logits = np.take_along_axis(found.logits, columns, 2)[:, :, 0]
        log_probs = logits - found.log_normalizer
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
                stopped[row] = is_stopped(request, self.history.row(row)[1:])
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
        at_stop = self._has_stops and bool(self._is_stopped[row])
        is_full = bool(self._num_new[row] == self._limits[row])
        ends = self.requests[row].config.ends(self._spec.tokens.eos)
        return Hypothesis(
            token_ids=tuple(ids[1:]),
            score=log_prob / int(self._num_new[row]),
            log_prob=log_prob,
            finish_reason=finish_reason(ids[-1], ends, is_stopped=at_stop, is_full=is_full),
        )
