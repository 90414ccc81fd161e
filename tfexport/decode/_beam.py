"""Run beam search with the hypotheses of Hugging Face transformers.

It agrees with `_beam_search` of transformers 5 hypothesis by hypothesis. A place without a hypothesis has the score
-inf; transformers uses -1e9. A source is removed as soon as its result is final. Transformers runs until all sources
are done, but adds nothing to a source that is done, so its results do not depend on the batch either. Scores are
float32.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tfexport.contract import ModelSpec
from tfexport.decode._history import History
from tfexport.decode._processors import Processors
from tfexport.decode._search import Outcome, Taken, is_broken, not_a_number, nothing_left, repaired
from tfexport.decode.request import Request
from tfexport.decode.result import FinishReason, Hypothesis, finish_reason
from tfexport.decode.stops import Stops
from tfexport.errors import BackendError
from tfexport.generation import DecodeConfig
from tfexport.runtime.session import Candidates, Floats, Ids, Mask, rows_of


class Extensions(NamedTuple):
    """The best extensions of each source's beams by one token, best first.

    Attributes:
        rows: the extended row, int64 [sources, num].
        token_ids: the new token, int64 [sources, num].
        log_probs: Σ log p, float32 [sources, num].
    """

    rows: Ids
    token_ids: Ids
    log_probs: Floats

    def first(self, num: int) -> Extensions:
        return Extensions(self.rows[:, :num], self.token_ids[:, :num], self.log_probs[:, :num])


class Ended(NamedTuple):
    """A finished hypothesis, with the start token and the length-penalized score."""

    token_ids: list[int]
    log_prob: float
    score: float
    reason: FinishReason


class Finished:
    """The num_beams best finished hypotheses of each source, best first.

    Attributes:
        worst: score of the last of them, float32 [sources]; -inf while there are fewer than num_beams.
    """

    def __init__(self, num_beams: int) -> None:
        self.worst: Floats = np.empty(0, np.float32)
        self._num_beams = num_beams
        self._ended: list[list[Ended]] = []

    def begin(self, sources: int) -> None:
        self.worst = np.concatenate((self.worst, np.full(sources, -np.inf, np.float32)))
        self._ended += [[] for _ in range(sources)]

    def add(self, source: int, ended: Ended) -> None:
        """Add a hypothesis if it is among the best; equal scores keep their order."""
        best = self._ended[source]
        insort(best, ended, key=lambda one: -one.score)
        if len(best) >= self._num_beams:
            del best[self._num_beams :]
            self.worst[source] = best[-1].score

    def select(self, kept: Ids) -> None:
        self.worst = self.worst[kept]
        self._ended = [self._ended[source] for source in kept.tolist()]

    def hypotheses(self, source: int, count: int) -> list[Hypothesis]:
        return [
            Hypothesis(
                token_ids=tuple(ended.token_ids[1:]),
                score=ended.score,
                log_prob=ended.log_prob,
                finish_reason=ended.reason,
            )
            for ended in self._ended[source][:count]
        ]


class BeamSearch:
    """Beam search with num_beams beams per source; the methods are those of `Search`."""

    follows_best = False

    def __init__(self, config: DecodeConfig, spec: ModelSpec) -> None:
        self.width = config.num_beams
        self.requests: list[Request] = []
        self.history = History(spec.vocab)
        self._config, self._processors = config, Processors(config, spec)
        self._ends, self._stops = self._processors.ends, Stops(config)
        self.stop_ids = self._processors.stop_ids
        # `width` beams continue even if each of the best beams ends with each of the end tokens.
        self._num_extensions = (1 + len(self._ends.ids)) * self.width
        # Divisors of the log-probability by length, float32; 0 has no negative powers.
        lengths = np.arange(spec.max_target_length + 2).clip(min=1).astype(np.float64)
        self._divisors: Floats = (lengths**config.length_penalty).astype(np.float32)
        self._finished = Finished(self.width)
        self._running: Floats = np.empty((0, self.width), np.float32)  # Σ log p; -inf for a missing beam
        self._num_new: Ids = np.empty(0, np.int64)
        self._limits: Ids = np.empty(0, np.int64)
        self._steps_left = 0  # until the first source is at its limit

    def add(self, requests: Sequence[Request]) -> None:
        self.requests += requests
        by_row = [request for request in requests for _ in range(self.width)]
        self.history.add(request.prompt for request in by_row)
        self._processors.add(by_row)
        running = np.full((len(requests), self.width), -np.inf, np.float32)
        running[:, 0] = [request.log_prob for request in requests]
        self._running = np.concatenate((self._running, running))
        self._num_new = np.concatenate((self._num_new, [request.num_forced for request in requests]))
        self._limits = np.concatenate((self._limits, [request.max_new_tokens for request in requests]))
        self._finished.begin(len(requests))
        self._stops.add(requests)
        self._steps_left = int((self._limits - self._num_new).min())

    def num_candidates(self) -> int:
        return self._processors.num_candidates(self._num_extensions, self.history)

    def take(self, found: Candidates) -> Taken:
        done: dict[int, Outcome] = {}
        broken = is_broken(found)
        if broken is not None:
            for place in np.unique(np.flatnonzero(broken) // self.width).tolist():
                done[place] = not_a_number(self.requests[place], int(self._num_new[place]))
            found = repaired(found, broken)
        token_ids, log_probs = self._processors.apply(found, self.history, self._num_new, self._limits)
        best = _extend(self._running, token_ids, log_probs, self._num_extensions)
        self._num_new += 1
        self._steps_left -= 1
        ends = self._ends.among(best.token_ids)
        if not self._steps_left:
            ends |= (self._num_new == self._limits)[:, None]
        stopped, late = None, None
        if self._stops.are_set:
            stopped, late = self._stopped(best, done), self._stops.are_late()
            ends |= stopped | late[:, None]
        going = best
        if np.count_nonzero(ends):
            self._finish(best, ends, stopped)
            going = _continue(best, ends)
        going = going.first(self.width)
        closed = self._is_settled(going)
        if not self._steps_left:
            closed |= self._num_new == self._limits
        if late is not None:
            closed |= late
        rows = going.rows
        if np.count_nonzero(closed):
            for place in np.flatnonzero(closed).tolist():
                request = self.requests[place]
                hypotheses = self._finished.hypotheses(place, request.config.num_return_sequences)
                done.setdefault(place, hypotheses or nothing_left(request, int(self._num_new[place]) - 1))
            # Rows of removed sources need not move.
            rows = np.where(closed[:, None], np.arange(rows.size).reshape(rows.shape), rows)
        self._running, order = going.log_probs, rows.ravel()
        moves = self.history.branch(order, going.token_ids.ravel())
        return Taken(order if moves else None, done)

    def steps_ahead(self) -> int:
        return 1  # any step may reorder the beams

    def follow(self, found: Candidates) -> None:
        raise AssertionError("a beam search takes one step at a time")

    def remove(self, kept: Ids) -> None:
        self.requests = [self.requests[place] for place in kept.tolist()]
        rows = rows_of(kept, self.width)
        self.history.keep(rows)
        self._processors.keep(rows)
        self._running, self._num_new, self._limits = self._running[kept], self._num_new[kept], self._limits[kept]
        self._finished.select(kept)
        self._stops.keep(kept)
        self._steps_left = int((self._limits - self._num_new).min()) if kept.size else 0

    def _stopped(self, best: Extensions, done: dict[int, Outcome]) -> Mask:
        stopped: Mask = np.zeros(best.rows.shape, np.bool_)
        for place, number in np.argwhere(best.log_probs > -np.inf).tolist():
            token_ids = [*self.history.row(best.rows[place, number])[1:], int(best.token_ids[place, number])]
            try:
                stopped[place, number] = self._stops.is_stopped(self.requests[place], token_ids)
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
            reason = finish_reason(token, self._ends, is_stopped=at_stop, is_full=full[place])
            self._finished.add(place, Ended([*self.history.row(row), token], log_prob, score, reason))

    def _is_settled(self, going: Extensions) -> Mask:
        # A heuristic unless `early_stopping` is "never": it judges the best beam as if it ended now.
        config, worst = self._config, self._finished.worst
        hopeful = config.early_stopping == "never" and config.length_penalty > 0
        attainable = going.log_probs[:, 0] / self._divisors.take(self._limits if hopeful else self._num_new)
        settled: Mask = attainable <= worst
        return settled | (worst > -np.inf) if config.early_stopping is True else settled


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
