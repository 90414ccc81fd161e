"""Run beam search with the hypotheses of Hugging Face transformers.

It agrees with `_beam_search` of transformers 5 hypothesis by hypothesis. A place without a hypothesis has the score
-inf; transformers uses -1e9. A source is removed as soon as its result is final. Transformers runs until all sources
are done, but adds nothing to a source that is done, so its results do not depend on the batch either. Scores are
float32.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from tfexport._io.phases import phase
from tfexport.contract import ModelSpec
from tfexport.decode._processors import Processors
from tfexport.decode._search import Outcome, Search, is_any, is_broken, nan_error, no_token_error, repaired
from tfexport.decode.request import Request
from tfexport.decode.result import Hypothesis, finish_reason
from tfexport.decode.stops import is_stopped
from tfexport.errors import BackendError
from tfexport.generation import DecodeConfig
from tfexport.runtime.session import ONE, Beams, BeamSteps, Candidates, Floats, Ids, Mask, rows_of

# Most steps at once, for which the history gets room.
_MOST_STEPS = 64
_SCORE = attrgetter("score")


class Extensions(NamedTuple):
    """The best extensions of each source by one token, best first, [sources, num]."""

    rows: Ids  # the extended rows
    token_ids: Ids  # the new tokens
    log_probs: Floats  # Σ log p


class Finished:
    """The num_beams best finished hypotheses of each source, best first."""

    def __init__(self, num_beams: int) -> None:
        self.best: list[list[Hypothesis]] = []
        self.worst: Floats = np.empty(0, np.float32)  # their lowest score; -inf while there are fewer than num_beams
        self._num_beams = num_beams

    def begin(self, num_sources: int) -> None:
        self.best += [[] for _ in range(num_sources)]
        self.worst = np.concatenate((self.worst, np.full(num_sources, -np.inf, np.float32)))

    def add(self, source: int, hypothesis: Hypothesis) -> None:
        """Add a hypothesis if it is among the best; equal scores keep their order."""
        best = self.best[source]
        best.append(hypothesis)
        best.sort(key=_SCORE, reverse=True)
        if len(best) >= self._num_beams:
            del best[self._num_beams :]
            self.worst[source] = best[-1].score

    def scores(self) -> Floats:
        """Return all scores, [sources, num_beams]; -inf for missing hypotheses."""
        scores = np.full((len(self.best), self._num_beams), -np.inf, np.float32)
        for source, best in enumerate(self.best):
            if best:
                scores[source, : len(best)] = [hypothesis.score for hypothesis in best]
        return scores

    def keep(self, sources: Ids) -> None:
        self.best = [self.best[source] for source in sources.tolist()]
        self.worst = self.worst[sources]


class BeamSearch(Search):
    """Beam search with num_beams beams per source."""

    def __init__(self, config: DecodeConfig, spec: ModelSpec) -> None:
        super().__init__(spec)
        self.width = config.num_beams
        self._config, self._processors = config, Processors(config, spec)
        self._ends = self._processors.ends
        # `width` beams continue even if each of the best beams ends with each of the end tokens.
        self._num_extensions = (1 + len(self._ends.ids)) * self.width
        self._divisors = _divisors(spec.max_target_length, config.length_penalty)
        self._is_hopeful = config.early_stopping == "never" and config.length_penalty > 0
        self._finished = Finished(self.width)
        self._running: Floats = np.empty((0, self.width), np.float32)  # Σ log p; -inf for a missing beam
        self._steps_left = 0  # until the first source is at its limit

    def add(self, requests: Sequence[Request]) -> None:
        super().add(requests)
        self._processors.add([request for request in requests for _ in range(self.width)])
        running = np.full((len(requests), self.width), -np.inf, np.float32)
        running[:, 0] = [request.log_prob for request in requests]
        self._running = np.concatenate((self._running, running))
        self._finished.begin(len(requests))
        self._steps_left = int((self._limits - self._num_new).min())

    def keep(self, sources: Ids) -> None:
        super().keep(sources)
        self._processors.keep(rows_of(sources, self.width))
        self._running = self._running[sources]
        self._finished.keep(sources)
        self._steps_left = int((self._limits - self._num_new).min()) if sources.size else 0

    def steps_ahead(self) -> int:
        return min(self._steps_left, _MOST_STEPS)

    def beams(self, steps: int) -> Beams | None:
        wanted, before = self.num_candidates(), self._processors.steps_before_end(self.history, self._num_new)
        if before is None or self._has_stops or self._num_extensions > self.width * wanted:
            return None
        config, self._running = self._config, np.ascontiguousarray(self._running)
        return Beams(
            num_candidates=wanted,
            num_extensions=self._num_extensions,
            end_ids=self._ends.ids,
            divisors=self._divisors,
            early_stopping="never" if self._is_hopeful else config.early_stopping is True,
            limits=self._limits,
            shortest=self._num_new + before[:: self.width],
            num_new=self._num_new,
            tokens=self.history.with_room(steps),
            running=self._running,
            scores=self._finished.scores(),
        )

    @phase("select")
    def follow_beams(self, found: BeamSteps) -> dict[int, Outcome]:
        for source, token_ids, score, log_prob in found.finished:
            reason = finish_reason(token_ids[-1], self._ends.ids, is_stopped=False, is_full=True)
            self._finished.add(source, Hypothesis(tuple(token_ids), score, log_prob, reason))
        self.history.written(found.steps)
        self._steps_left -= found.steps
        done: dict[int, Outcome] = {
            place: nan_error(self.requests[place], int(self._num_new[place])) for place in found.broken
        }
        return done | {place: self._outcome(place) for place in found.done}

    def num_candidates(self) -> int:
        return self._processors.num_candidates(self._num_extensions, self.history)

    @phase("select")
    def take(self, found: Candidates) -> tuple[Ids | None, dict[int, Outcome]]:
        done: dict[int, Outcome] = {}
        broken = is_broken(found)
        if broken is not None:
            for place in np.unique(np.flatnonzero(broken) // self.width).tolist():
                done[place] = nan_error(self.requests[place], int(self._num_new[place]))
            found = repaired(found, broken)
        token_ids, log_probs = self._processors.apply(found, self.history, self._num_new, self._limits)
        best = _extend(self._running, token_ids, log_probs, self._num_extensions)
        self._num_new = self._num_new + ONE
        self._steps_left -= 1
        ends = self._ends.among(best.token_ids)
        if not self._steps_left:
            ends |= (self._num_new == self._limits)[:, None]
        stopped, late = None, None
        if self._has_stops:
            stopped, late = self._stopped(best, done), self._deadlines.are_late()
            ends |= stopped | late[:, None]
        going = best
        if is_any(ends):
            self._finish(best, ends, stopped)
            going = _continue(best, ends)
        first = np.s_[:, : self.width]
        going = Extensions(going.rows[first], going.token_ids[first], going.log_probs[first])
        closed = self._is_settled(going)
        if not self._steps_left:
            closed |= self._num_new == self._limits
        if late is not None:
            closed |= late
        rows = going.rows
        if is_any(closed):
            for place in np.flatnonzero(closed).tolist():
                done.setdefault(place, self._outcome(place))
            if len(done) == len(self.requests):
                return None, done
            # Rows of removed sources need not move.
            rows = np.where(closed[:, None], np.arange(rows.size).reshape(rows.shape), rows)
        self._running, order = going.log_probs, rows.ravel()
        moves = self.history.branch(order, going.token_ids.ravel())
        return order if moves else None, done

    def _outcome(self, place: int) -> Outcome:
        request = self.requests[place]
        hypotheses = self._finished.best[place][: request.config.num_return_sequences]
        return hypotheses or no_token_error(request, int(self._num_new[place]) - 1)

    def _stopped(self, best: Extensions, done: dict[int, Outcome]) -> Mask:
        stopped: Mask = np.zeros(best.rows.shape, np.bool_)
        for place, number in np.argwhere(best.log_probs > -np.inf).tolist():
            token_ids = [*self.history.row(best.rows[place, number])[1:], int(best.token_ids[place, number])]
            try:
                stopped[place, number] = is_stopped(self.requests[place], token_ids)
            except BackendError as error:
                done.setdefault(place, error)
        return stopped

    def _finish(self, best: Extensions, ends: Mask, stopped: Mask | None) -> None:
        scores = best.log_probs / self._divisors.take(self._num_new)[:, None]
        better = ends & (scores > self._finished.worst[:, None])
        better[:, self.width :] = False  # as in transformers, spare extensions cannot finish
        places, log_probs = better.nonzero()[0].tolist(), best.log_probs[better].tolist()
        rows, token_ids = best.rows[better].tolist(), best.token_ids[better].tolist()
        are_stopped = [False] * len(rows) if stopped is None else stopped[better].tolist()
        full = (self._num_new == self._limits).tolist()
        for place, row, token, log_prob, score, at_stop in zip(
            places, rows, token_ids, log_probs, scores[better].tolist(), are_stopped, strict=True
        ):
            reason = finish_reason(token, self._ends.ids, is_stopped=at_stop, is_full=full[place])
            ids = (*self.history.row(row)[1:], token)
            self._finished.add(place, Hypothesis(ids, score, log_prob, reason))

    def _is_settled(self, going: Extensions) -> Mask:
        # A heuristic unless `early_stopping` is "never": it judges the best beam as if it ended now.
        worst = self._finished.worst
        attainable = going.log_probs[:, 0] / self._divisors.take(self._limits if self._is_hopeful else self._num_new)
        settled: Mask = attainable <= worst
        return settled | (worst > -np.inf) if self._config.early_stopping is True else settled


@functools.lru_cache(16)
def _divisors(max_length: int, length_penalty: float) -> Floats:
    """Return the divisor of a log-probability by length; 0 has no negative powers."""
    lengths = np.arange(max_length + 2).clip(min=1).astype(np.float64)
    divisors: Floats = (lengths**length_penalty).astype(np.float32)
    return divisors


def _extend(running: Floats, token_ids: Ids, log_probs: Floats, num: int) -> Extensions:
    totals = running.reshape(-1, 1) + log_probs
    by_source = totals.reshape(len(running), -1)
    # Equal scores keep the order of the beams, then of the candidates.
    chosen = (-by_source).argsort(1, kind="stable")[:, :num]
    if len(running) > 1:
        chosen = chosen + np.arange(0, totals.size, by_source.shape[1])[:, None]
    return Extensions(chosen // token_ids.shape[1], token_ids.take(chosen), totals.take(chosen))


def _continue(best: Extensions, ends: Mask) -> Extensions:
    sources, order = np.arange(len(ends))[:, None], ends.argsort(1, kind="stable")
    log_probs = np.where(ends, -np.inf, best.log_probs)
    return Extensions(best.rows[sources, order], best.token_ids[sources, order], log_probs[sources, order])
