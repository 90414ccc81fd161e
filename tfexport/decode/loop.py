"""Run the decoding loop: admit waiting requests and step until all are finished.

Sources join the batch as others are removed. All requests of one width share a batch; those with the same options also
share a search.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tfexport.decode._beam import BeamSearch
from tfexport.decode._greedy import GreedySearch
from tfexport.decode._search import Outcome, Search, forced_outcome, search_key
from tfexport.decode._speculation import Speculation
from tfexport.decode.request import Request, Status
from tfexport.errors import Cancelled
from tfexport.runtime.session import (
    Batch,
    Candidates,
    GreedySteps,
    Ids,
    MultiBeam,
    MultiStep,
    Session,
    Verifies,
    close_up,
    rows_of,
)
from tfexport.runtime.sources import Sources, pad_sources

# Sources join several at a time, an eighth of a full batch, to share an encoder run and the binding of buffers.
JOIN_SHARE = 8
# Time limit of steps taken at once in a call that can be cancelled.
SEEN_WITHIN_S = 0.02


@dataclass(frozen=True)
class Update:
    """The result of a step for a request."""

    request: Request
    token_id: int | None = None  # the newest one if the request streams
    outcome: Outcome | None = None  # hypotheses, or the error of this text; None while it is decoded


class Loop:
    """Decode at most `max_sources` requests at once, on one thread."""

    def __init__(self, session: Session, max_sources: int) -> None:
        self.num_steps = 0  # decoder steps taken so far
        self._session, self._max_sources = session, max_sources
        self._waiting: dict[int, deque[Request]] = {}
        self._answered: list[Update] = []
        self._running: dict[int, _RunningBatch] = {}

    @property
    def is_busy(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self._waiting or self._answered)

    @property
    def num_rows(self) -> int:
        """Number of rows that a step computes."""
        return sum(running.width * running.num_sources for running in self._running.values())

    def can_join(self, width: int) -> bool:
        """Return whether a request with `width` rows could join the running ones."""
        running = self._running.get(width)
        return running is None or running.batch.can_join or not running.num_sources

    def submit(self, requests: Iterable[Request]) -> None:
        """Queue requests, in this order."""
        for request in requests:
            request.status = Status.WAITING
            if request.is_answered:
                self._answered.append(Update(request, outcome=forced_outcome(request, self._session.spec)))
            else:
                self._waiting.setdefault(request.config.num_beams, deque()).append(request)

    def join(self, requests: Sequence[Request], sources: Sources) -> None:
        """Add requests of one width, whose sources are encoded, to the running ones."""
        width = requests[0].config.num_beams
        self._waiting.setdefault(width, deque())
        self._running_of(width).add(requests, sources)

    def cancel(self, requests: Collection[Request]) -> None:
        """Remove waiting or running requests; the loop reports nothing more about them."""
        for request in requests:
            if request.status is not Status.DONE:
                request.status = Status.CANCELLED
        self._answered = [update for update in self._answered if update.request.status is not Status.CANCELLED]
        for width, waiting in self._waiting.items():
            self._waiting[width] = deque(one for one in waiting if one.status is not Status.CANCELLED)
        for running in self._running.values():
            running.remove_cancelled()
        self._forget_empty()

    def admit(self) -> None:
        """Encode waiting requests and add them to the batch if there is room."""
        for width, waiting in self._waiting.items():
            running = self._running_of(width)
            if waiting:
                self._admit(running, waiting)

    def step(self, most: int | None = None) -> list[Update]:
        """Admit waiting requests, take a step of every batch, and return what is new.

        Several steps are taken at once, at most `most`, if the result is the same.
        """
        updates, self._answered = self._answered, []
        self.admit()
        for running in self._running.values():
            updates += running.step(most)
            self.num_steps += running.num_steps
        for update in updates:
            if update.outcome is not None:
                update.request.status = Status.DONE
        self._forget_empty()
        return [update if update.request.config.return_scores else _without_scores(update) for update in updates]

    def _running_of(self, width: int) -> _RunningBatch:
        if width not in self._running:
            self._running[width] = _RunningBatch(self._session, width)
        return self._running[width]

    def _forget_empty(self) -> None:
        for width, waiting in list(self._waiting.items()):
            running = self._running.get(width)
            if not waiting and not (running and running.num_sources):
                del self._waiting[width]
                self._running.pop(width, None)

    def _admit(self, running: _RunningBatch, waiting: deque[Request]) -> None:
        most = self._session.limits.rows.most
        places = self._max_sources if most is None else min(self._max_sources, most // running.width)
        free = min(places - running.num_sources, len(waiting))
        if not running.batch.can_join:
            if not running.num_sources:
                running.add(_equally_long(waiting, free))
        elif not running.num_sources or (free and free >= min(-(-places // JOIN_SHARE), len(waiting))):
            running.add([waiting.popleft() for _ in range(free)])


def check_cancelled(cancel: threading.Event | None) -> None:
    """Raise `Cancelled` if the event of a call is set."""
    if cancel is not None and cancel.is_set():
        raise Cancelled("the call was cancelled: its event is set; clear it to call again")


def run_loop(loop: Loop, cancel: threading.Event | None) -> Iterator[list[Update]]:
    """Step a loop until it is idle; raise `Cancelled` if the event is set."""
    most = None if cancel is None else 1
    while loop.is_busy:
        check_cancelled(cancel)
        began, taken = time.perf_counter(), loop.num_steps
        found = loop.step(most)
        took, taken = time.perf_counter() - began, loop.num_steps - taken
        if cancel is not None and taken:
            most = max(1, int(taken * SEEN_WITHIN_S / took))
        yield found


def _equally_long(waiting: deque[Request], count: int) -> list[Request]:
    """Remove and return up to `count` requests whose prompts are as long as the first."""
    length = len(waiting[0].prompt)
    taken = [request for request in waiting if len(request.prompt) == length][:count]
    for request in taken:
        waiting.remove(request)
    return taken


def _without_scores(update: Update) -> Update:
    if not isinstance(update.outcome, list):
        return update
    return replace(update, outcome=[replace(one, score=None, log_prob=None) for one in update.outcome])


def _steps(found: Candidates, steps: Any) -> Candidates:
    return Candidates(found.token_ids[steps], found.logits[steps], found.log_normalizer[steps])


class _RunningBatch:
    """A batch of `width` rows per source, and the searches that share it."""

    def __init__(self, session: Session, width: int) -> None:
        self.width, self.num_sources = width, 0
        self.num_steps = 0  # that the last `step` took
        self._session, self._spec = session, session.spec
        self._speculation: Speculation | None = None
        self._groups: dict[object, _Group] = {}
        self._begin()

    def add(self, requests: Sequence[Request], sources: Sources | None = None) -> None:
        if self._is_spent:  # faster than emptying the batch
            self._begin()
        first = self.num_sources
        if sources is None:
            sources = pad_sources(self._spec.source, [request.source for request in requests])
        self.batch.add(sources, [request.prompt for request in requests])
        self.num_sources += len(requests)
        by_options: dict[object, list[int]] = {}
        newest, key = requests[0].config, search_key(requests[0].config)
        for number, request in enumerate(requests):
            request.status = Status.RUNNING
            if request.config is not newest:  # the requests of a call share one
                newest, key = request.config, search_key(request.config)
            by_options.setdefault(key, []).append(number)
        for key, numbers in by_options.items():
            if key not in self._groups:
                config = requests[numbers[0]].config
                search = BeamSearch(config, self._spec) if self.width > 1 else GreedySearch(self._spec)
                self._groups[key] = _Group(search)
            self._groups[key].add([requests[number] for number in numbers], first + np.array(numbers))

    def _begin(self) -> None:
        self.batch: Batch = self._session.batch(self.width)
        # Not by `isinstance`, which takes 40 µs for a protocol.
        batch: Any = self.batch if self.width == 1 else None
        beams: Any = self.batch if self.width > 1 else None
        self._multi_step: MultiStep | None = batch if hasattr(batch, "multi_step") else None
        self._multi_beam: MultiBeam | None = beams if hasattr(beams, "beam_steps") else None
        self._verifier: Verifies | None = batch if getattr(batch, "can_verify", False) else None
        self._is_spent = False

    def step(self, most: int | None) -> list[Update]:
        groups = list(self._groups.values())
        if len(groups) == 1:
            search, most = groups[0].search, 1 if groups[0].streams else most
            if speculation := self._drafts(search):
                if draft := speculation.draft(search):
                    return self._verify(groups[0], speculation, draft)
                plain = speculation.plain_steps()
                most = plain if most is None else min(most, plain)
            if self._multi_beam is None or (taken := self._take_beams(self._multi_beam, search, most)) is None:
                order, groups[0].done = search.take(self._take_steps(search, most))
            else:
                order, groups[0].done = None, taken
        else:
            order, self.num_steps = self._take_each(groups), 1
        if order is not None:
            self.batch.reorder(order)
        updates = [update for group in groups if group.done or group.streams for update in group.updates()]
        self._remove_done()
        return updates

    def _take_steps(self, search: Search, most: int | None) -> Candidates:
        token_ids, num_candidates, steps = search.history.newest, search.num_candidates(), search.steps_ahead()
        if most is not None:
            steps = min(steps, most)
        needs_scores = search.needs_scores
        if self._multi_step is None or (steps == 1 and needs_scores):
            self.num_steps = 1
            return self.batch.step(token_ids, num_candidates)
        # The search takes the last step itself, because that one may end a text.
        asked = GreedySteps(steps, num_candidates, search.stop_ids, search.banned_ids, needs_scores)
        found = self._multi_step.multi_step(token_ids, asked)
        self.num_steps = len(found.token_ids)
        if self.num_steps > 1:
            search.follow(_steps(found, np.s_[:-1]))
        return _steps(found, -1)

    def _take_beams(self, batch: MultiBeam, search: Search, most: int | None) -> dict[int, Outcome] | None:
        steps = search.steps_ahead() if most is None else min(search.steps_ahead(), most)
        beams = search.beams(steps)
        if beams is None:
            return None
        found = batch.beam_steps(beams, steps)
        self.num_steps = found.steps
        return search.follow_beams(found)

    def _drafts(self, search: Search) -> Speculation | None:
        if self._verifier is None or self.num_sources > 1 or not search.follows_best:
            return None
        (request,) = search.requests
        if request.config.prompt_lookup_num_tokens is None:
            return None
        if self._speculation is None or self._speculation.request is not request:
            self._speculation = Speculation(request, self._spec)
        return self._speculation

    def _verify(self, group: _Group, speculation: Speculation, draft: list[int]) -> list[Update]:
        assert self._verifier is not None
        search, length, updates = group.search, int(self.batch.lengths[0]), list[Update]()
        found = self._verifier.verify(np.concatenate((search.history.newest, draft)), search.num_candidates())
        accepted = 0
        if search.steps_ahead() > 1 and not group.streams:  # then only stops need single steps
            for best, token in zip(found.token_ids[:, 0].tolist(), draft, strict=False):
                if best != token or best in search.stop_ids:
                    break
                accepted += 1
            if accepted:
                search.follow(_steps(found, np.s_[:accepted, None]))
        while True:
            _, group.done = search.take(_steps(found, np.s_[accepted : accepted + 1]))
            if group.done or group.streams:
                updates += group.updates()
            if group.done or accepted == len(draft) or search.history.newest[0] != draft[accepted]:
                break
            accepted += 1
        self._verifier.rewind(length + accepted + 1)
        speculation.note(len(draft), accepted, int(search.history.lengths[0]))
        self.num_steps = 1
        self._remove_done()
        return updates

    def remove_cancelled(self) -> None:
        for group in self._groups.values():
            requests = enumerate(group.search.requests)
            group.done = {place: [] for place, request in requests if request.status is Status.CANCELLED}
        self._remove_done()

    def _remove_done(self) -> None:
        num_done = sum(len(group.done) for group in self._groups.values())
        if num_done == self.num_sources:
            self._groups, self._is_spent = {}, True
        elif num_done:
            # The remaining sources close up in the batch and in each search.
            removed = np.concatenate([group.places[list(group.done)] for group in self._groups.values()])
            remaining = close_up(self.num_sources, removed)
            moved_to = np.empty(self.num_sources, np.int64)
            moved_to[remaining] = np.arange(remaining.size)
            self.batch.remove(removed)
            for group in self._groups.values():
                group.remove_done(moved_to)
            num_groups = len(self._groups)
            self._groups = {key: group for key, group in self._groups.items() if group.places.size}
            if (
                len(self._groups) == 1 < num_groups
            ):  # then its sources are those of the batch and must be in the same order
                (group,) = self._groups.values()
                group.keep(group.places.argsort())
        self.num_sources -= num_done

    def _take_each(self, groups: list[_Group]) -> Ids | None:
        rows = [rows_of(group.places, self.width) for group in groups]
        target_ids, order = np.empty(self.batch.lengths.size, np.int64), np.arange(self.batch.lengths.size)
        for group, group_rows in zip(groups, rows, strict=True):
            target_ids[group_rows] = group.search.history.newest
        wanted = [group.search.num_candidates() for group in groups]
        found = self.batch.step(target_ids, max(wanted))
        for group, group_rows, count in zip(groups, rows, wanted, strict=True):
            part = np.s_[group_rows, :count]
            some = Candidates(found.token_ids[part], found.logits[part], found.log_normalizer[group_rows])
            moved, group.done = group.search.take(some)
            if moved is not None:
                order[group_rows] = group_rows[moved]
        return order if self.width > 1 else None


class _Group:
    """Requests with the same options, which share a search."""

    def __init__(self, search: Search) -> None:
        self.search = search
        self.places: Ids = np.empty(0, np.int64)  # in the batch, [sources]
        self.done: dict[int, Outcome] = {}  # of the last step, by place in the search
        self.streams = False  # whether any of the requests streams

    def add(self, requests: list[Request], places: Ids) -> None:
        self.search.add(requests)
        self.places = np.concatenate((self.places, places))
        self.streams = self.streams or any(request.stream for request in requests)

    def updates(self) -> list[Update]:
        requests = self.search.requests
        if not self.streams:
            return [Update(requests[place], outcome=outcome) for place, outcome in self.done.items()]
        newest = self.search.history.newest.tolist()
        return [
            Update(request, newest[place] if request.stream else None, self.done.get(place))
            for place, request in enumerate(requests)
            if request.stream or place in self.done
        ]

    def remove_done(self, moved_to: Ids) -> None:
        remaining = close_up(self.places.size, np.array(list(self.done), np.int64))
        self.places, self.done = moved_to[self.places], {}
        self.keep(remaining)

    def keep(self, sources: Ids) -> None:
        self.search.keep(sources)
        self.places = self.places[sources]
        self.streams = self.streams and any(request.stream for request in self.search.requests)
