"""Run the decoding loop: admit waiting requests and step until all are finished.

Sources join the batch as others are removed. All requests of one width share a batch; those with the same options also
share a search.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from tfexport.decode._beam import BeamSearch
from tfexport.decode._greedy import GreedySearch
from tfexport.decode._search import Outcome, Search, forced_alone, settings
from tfexport.decode.request import Request, Status
from tfexport.errors import Cancelled
from tfexport.runtime.session import Batch, Candidates, Ids, MultiStep, Session, Verifies, close_up, pad_right, rows_of

if TYPE_CHECKING:
    from tfexport.decode._speculation import Speculation

# Sources join several at a time, an eighth of a full batch, to share an encoder run and the binding of buffers.
JOIN_SHARE = 8
# Time limit of steps taken at once in a call that can be cancelled.
SEEN_WITHIN_S = 0.02


@dataclass(frozen=True)
class Update:
    """The result of a step for a request.

    Attributes:
        request: the request as it was submitted.
        token_id: its newest token if it streams; else None.
        outcome: its hypotheses, or the error of this text; None while it is decoded.
    """

    request: Request
    token_id: int | None = None
    outcome: Outcome | None = None


class Loop:
    """Requests on their way through a session, for use by one thread.

    Attributes:
        num_steps: decoder steps taken so far.
    """

    def __init__(self, session: Session, max_sources: int) -> None:
        """Create a loop that decodes at most `max_sources` sources at once."""
        self.num_steps = 0
        self._session, self._max_sources = session, max_sources
        self._waiting: dict[int, deque[Request]] = {}
        self._answered: list[Update] = []
        self._running: dict[int, _Running] = {}

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
        return running is None or running.can_join or not running.num_sources

    def submit(self, requests: Iterable[Request]) -> None:
        """Queue requests, in this order."""
        for request in requests:
            request.status = Status.WAITING
            if request.is_answered:
                self._answered.append(Update(request, outcome=forced_alone(request, self._session.spec)))
                continue
            self._waiting.setdefault(request.config.num_beams, deque()).append(request)

    def cancel(self, requests: Collection[Request]) -> None:
        """Remove waiting or running requests; the loop reports nothing more about them."""
        for request in requests:
            if request.status is not Status.DONE:
                request.status = Status.CANCELLED
        self._answered = [update for update in self._answered if update.request.status is not Status.CANCELLED]
        for waiting in self._waiting.values():
            _keep(waiting, [request for request in waiting if request.status is not Status.CANCELLED])
        for running in self._running.values():
            running.remove_cancelled()
        self._forget_empty()

    def admit(self) -> None:
        """Encode waiting requests and add them to the batch if there is room."""
        for width, waiting in self._waiting.items():
            if width not in self._running:
                self._running[width] = _Running(self._session, width)
            if waiting:
                self._admit(self._running[width], waiting)

    def step(self, most: int | None = None) -> list[Update]:
        """Admit waiting requests and take a step of every batch.

        Several steps are taken at once, at most `most`, if the result is the same.

        Returns:
            The finished requests, and each token of those that stream.
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
        return updates

    def _forget_empty(self) -> None:
        for width in list(self._waiting):
            running = self._running.get(width)
            if not self._waiting[width] and not (running and running.num_sources):
                del self._waiting[width]
                self._running.pop(width, None)

    def _admit(self, running: _Running, waiting: deque[Request]) -> None:
        most = self._session.limits.rows.most
        places = self._max_sources if most is None else min(self._max_sources, most // running.width)
        free = min(places - running.num_sources, len(waiting))
        if not running.num_sources:
            running.add(_first(waiting, free) if running.can_join else _equally_long(waiting, free))
        elif running.can_join and free and free >= min(-(-places // JOIN_SHARE), len(waiting)):
            running.add(_first(waiting, free))


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


def _first(waiting: deque[Request], count: int) -> list[Request]:
    return [waiting.popleft() for _ in range(count)]


def _equally_long(waiting: deque[Request], count: int) -> list[Request]:
    length = len(waiting[0].prompt)
    taken = [request for request in waiting if len(request.prompt) == length][:count]
    ids = {request.id for request in taken}
    _keep(waiting, [request for request in waiting if request.id not in ids])
    return taken


def _keep(waiting: deque[Request], kept: list[Request]) -> None:
    waiting.clear()
    waiting.extend(kept)


def _steps(found: Candidates, steps: Any) -> Candidates:
    return Candidates(found.token_ids[steps], found.logits[steps], found.log_normalizer[steps])


class _Running:
    """A batch and the searches that share it.

    Attributes:
        width: rows of a source.
        num_sources: number of sources being decoded.
        num_steps: steps that the last `step` took.
    """

    def __init__(self, session: Session, width: int) -> None:
        self.width = width
        self.num_sources = self.num_steps = 0
        self._session, self._spec = session, session.spec
        self._speculation: Speculation | None = None
        self._begin()
        self._parts: dict[tuple[object, ...], _Part] = {}

    @property
    def can_join(self) -> bool:
        return self._batch.can_join

    def add(self, requests: list[Request]) -> None:
        if self._is_spent:  # faster than emptying the batch
            self._begin()
        first = self.num_sources
        source_ids, source_mask = pad_right([request.source_ids for request in requests], self._spec.tokens.pad)
        self._batch.add(source_ids, source_mask, [request.prompt for request in requests])
        self.num_sources += len(requests)
        alike: dict[tuple[object, ...], list[int]] = {}
        newest, key = requests[0].config, settings(requests[0].config)
        for number, request in enumerate(requests):
            request.status = Status.RUNNING
            if request.config is not newest:  # the requests of a call share one
                newest, key = request.config, settings(request.config)
            alike.setdefault(key, []).append(number)
        for key, numbers in alike.items():
            if key not in self._parts:
                search = BeamSearch if self.width > 1 else GreedySearch
                self._parts[key] = _Part(search(requests[numbers[0]].config, self._spec))
            self._parts[key].add([requests[number] for number in numbers], first + np.array(numbers))

    def _begin(self) -> None:
        self._batch: Batch = self._session.batch(self.width)
        # Checked once, because `isinstance` takes a large part of a step's time; beams take single steps.
        self._together = self._batch if self.width == 1 and isinstance(self._batch, MultiStep) else None
        is_able = self.width == 1 and isinstance(self._batch, Verifies) and self._batch.can_verify
        self._verifier = cast(Verifies, self._batch) if is_able else None
        self._is_spent = False

    def step(self, most: int | None) -> list[Update]:
        parts = list(self._parts.values())
        if len(parts) == 1:
            search, most = parts[0].search, 1 if parts[0].streams else most
            if speculation := self._drafts(search):
                if draft := speculation.draft(search):
                    return self._verify(parts[0], speculation, draft)
                plain = speculation.plain_steps()
                most = plain if most is None else min(most, plain)
            order, parts[0].done = search.take(self._take_steps(search, most))
        else:
            order, self.num_steps = self._take_each(parts), 1
        if order is not None:
            self._batch.reorder(order)
        updates = [update for part in parts if part.done or part.streams for update in part.updates()]
        self._remove_done()
        return updates

    def _take_steps(self, search: Search, most: int | None) -> Candidates:
        token_ids, num_candidates, steps = search.history.newest, search.num_candidates(), search.steps_ahead()
        if most is not None:
            steps = min(steps, most)
        if steps == 1 or self._together is None:
            self.num_steps = 1
            return self._batch.step(token_ids, num_candidates)
        # The search takes the last step itself, because that one may end a text.
        found = self._together.multi_step(token_ids, num_candidates, steps, search.stop_ids)
        self.num_steps = len(found.token_ids)
        if self.num_steps > 1:
            search.follow(_steps(found, np.s_[:-1]))
        return _steps(found, -1)

    def _drafts(self, search: Search) -> Speculation | None:
        if self._verifier is None or self.num_sources > 1 or not search.follows_best:
            return None
        (request,) = search.requests
        if request.config.prompt_lookup_num_tokens is None:
            return None
        if self._speculation is None or self._speculation.request is not request:
            from tfexport.decode._speculation import Speculation

            self._speculation = Speculation(request, self._spec)
        return self._speculation

    def _verify(self, part: _Part, speculation: Speculation, draft: list[int]) -> list[Update]:
        assert self._verifier is not None
        search, length, updates = part.search, int(self._batch.lengths[0]), list[Update]()
        found = self._verifier.verify(np.concatenate((search.history.newest, draft)), search.num_candidates())
        accepted = 0
        if search.steps_ahead() > 1 and not part.streams:  # then only stops need single steps
            for best, token in zip(found.token_ids[:, 0].tolist(), draft, strict=False):
                if best != token or best in search.stop_ids:
                    break
                accepted += 1
            if accepted:
                search.follow(_steps(found, np.s_[:accepted, None]))
        while True:
            _, part.done = search.take(_steps(found, np.s_[accepted : accepted + 1]))
            if part.done or part.streams:
                updates += part.updates()
            if part.done or accepted == len(draft) or search.history.newest[0] != draft[accepted]:
                break
            accepted += 1
        self._verifier.rewind(length + accepted + 1)
        speculation.note(len(draft), accepted, int(search.history.lengths[0]))
        self.num_steps = 1
        self._remove_done()
        return updates

    def remove_cancelled(self) -> None:
        for part in self._parts.values():
            requests = enumerate(part.search.requests)
            part.done = {place: [] for place, one in requests if one.status is Status.CANCELLED}
        self._remove_done()

    def _remove_done(self) -> None:
        num_done = sum(len(part.done) for part in self._parts.values())
        if num_done == self.num_sources:
            self._parts, self._is_spent = {}, True
        elif num_done:
            self._remove()
        self.num_sources -= num_done

    def _take_each(self, parts: list[_Part]) -> Ids | None:
        rows = [rows_of(part.places, self.width) for part in parts]
        target_ids, order = np.empty(self._batch.lengths.size, np.int64), np.arange(self._batch.lengths.size)
        for part, own in zip(parts, rows, strict=True):
            target_ids[own] = part.search.history.newest
        wanted = [part.search.num_candidates() for part in parts]
        found = self._batch.step(target_ids, max(wanted))
        for part, own, count in zip(parts, rows, wanted, strict=True):
            some = Candidates(found.token_ids[own, :count], found.logits[own, :count], found.log_normalizer[own])
            moved, part.done = part.search.take(some)
            if moved is not None:
                order[own] = own[moved]
        return order if self.width > 1 else None

    def _remove(self) -> None:
        # The remaining sources close up in the batch and in each search.
        leaving = np.concatenate([part.places[list(part.done)] for part in self._parts.values()])
        kept = close_up(self.num_sources, leaving)
        moved_to = np.empty(self.num_sources, np.int64)
        moved_to[kept] = np.arange(kept.size)
        self._batch.remove(leaving)
        for part in self._parts.values():
            part.remove_done(moved_to)
        self._parts = {key: part for key, part in self._parts.items() if part.places.size}
        if len(self._parts) == 1:  # then its sources are those of the batch and must be in the same order
            (part,) = self._parts.values()
            part.keep(part.places.argsort())


class _Part:
    """A search and the places of its sources in the batch.

    Attributes:
        search: search for requests with the same options.
        places: places of its sources in the batch, int64 [sources].
        done: outcomes of the last step, by place in the search.
        streams: whether any of its requests streams.
    """

    def __init__(self, search: Search) -> None:
        self.search = search
        self.places: Ids = np.empty(0, np.int64)
        self.done: dict[int, Outcome] = {}
        self.streams = False

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
        stay = close_up(self.places.size, np.array(list(self.done), np.int64))
        self.places, self.done = moved_to[self.places], {}
        self.keep(stay)

    def keep(self, kept: Ids) -> None:
        self.search.remove(kept)
        self.places = self.places[kept]
        self.streams = self.streams and any(request.stream for request in self.search.requests)
