"""The loop of all decoding: admit what waits, step until nothing is left.

Sources join the batch as others leave it. All requests of one width share a
batch, whatever they ask; those that ask alike share a search.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from tfexport.decode.beam import BeamSearch
from tfexport.decode.config import DecodeConfig
from tfexport.decode.greedy import GreedySearch
from tfexport.decode.multi_step import take_steps
from tfexport.decode.request import Request
from tfexport.decode.search import Outcome, Search, settings
from tfexport.runtime.session import Batch, Candidates, Ids, Session, close_up, pad_right

# Sources join several at a time, an eighth of a full batch: the encoder is run, and buffers are bound, once for all.
JOIN_SHARE = 8


@dataclass(frozen=True)
class Update:
    """What a step has brought a request.

    Attributes:
        request: as it was submitted.
        token_id: its newest token; None where a request has several rows, or steps are taken together.
        outcome: its hypotheses, or what was wrong with this text alone; None while it goes on.
    """

    request: Request
    token_id: int | None = None
    outcome: Outcome | None = None


class Loop:
    """Requests on their way through a session: `submit` any number, `step` while it `is_busy`.

    It belongs to one thread.
    """

    def __init__(self, session: Session, max_sources: int, *, stream: bool = False) -> None:
        """Begin without a request.

        Args:
            session: any backend.
            max_sources: decoded at once; fewer where the session takes fewer rows.
            stream: tell of every token; then no steps are taken together.
        """
        self._session, self._max_sources, self._stream = session, max_sources, stream
        self._waiting: dict[int, deque[Request]] = {}
        self._running: dict[int, _Running] = {}

    @property
    def is_busy(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self._waiting)

    def submit(self, requests: Iterable[Request]) -> None:
        """Let requests wait for their turn, in this order."""
        for request in requests:
            self._waiting.setdefault(request.config.num_beams, deque()).append(request)

    def step(self) -> list[Update]:
        """Admit what waits where there is room, and take a step of every batch.

        Returns:
            What is finished, and in a stream each token too.

        Raises:
            BackendError: the backend failed.
        """
        updates: list[Update] = []
        for width in list(self._waiting):
            if width not in self._running:
                self._running[width] = _Running(self._session, width)
            running, waiting = self._running[width], self._waiting[width]
            self._admit(running, waiting)
            updates += running.step(stream=self._stream)
            if not running.num_sources and not waiting:
                del self._running[width], self._waiting[width]
        return updates

    def _admit(self, running: _Running, waiting: deque[Request]) -> None:
        """Let waiting requests join where enough places are free."""
        most = self._session.limits.rows.most
        places = self._max_sources if most is None else min(self._max_sources, most // running.width)
        free = min(places - running.num_sources, len(waiting))
        if not running.num_sources:
            running.add(_equally_long(waiting, free) if not running.can_join else _first(waiting, free))
        elif running.can_join and free and free >= min(-(-places // JOIN_SHARE), len(waiting)):
            running.add(_first(waiting, free))


def _first(waiting: deque[Request], count: int) -> list[Request]:
    return [waiting.popleft() for _ in range(count)]


def _equally_long(waiting: deque[Request], count: int) -> list[Request]:
    """Take up to `count` requests whose prompts are as long as the first one's; the others go on waiting."""
    length = len(waiting[0].prompt)
    taken = [request for request in waiting if len(request.prompt) == length][:count]
    numbers = {id(request) for request in taken}
    rest = [request for request in waiting if id(request) not in numbers]
    waiting.clear()
    waiting.extend(rest)
    return taken


class _Running:
    """One batch and the searches that share it, kept in step.

    Attributes:
        width: rows of a source.
    """

    def __init__(self, session: Session, width: int) -> None:
        self.width = width
        self._spec = session.spec
        self._batch: Batch = session.batch(width)
        self._searches: dict[DecodeConfig, Search] = {}
        self._places: dict[DecodeConfig, Ids] = {}  # in the batch, of the sources of each search

    @property
    def num_sources(self) -> int:
        return self._batch.lengths.size // self.width

    @property
    def can_join(self) -> bool:
        return self._batch.can_join

    def add(self, requests: list[Request]) -> None:
        """Let requests join the batch, and each its search."""
        first = self.num_sources
        source_ids, source_mask = pad_right([request.source_ids for request in requests], self._spec.tokens.pad)
        self._batch.add(source_ids, source_mask, [request.prompt for request in requests])
        alike: dict[DecodeConfig, list[int]] = {}
        keys = {id(request.config): settings(request.config) for request in requests}
        for number, request in enumerate(requests):
            alike.setdefault(keys[id(request.config)], []).append(number)
        for key, numbers in alike.items():
            if key not in self._searches:
                self._searches[key] = (BeamSearch if self.width > 1 else GreedySearch)(key, self._spec)
                self._places[key] = np.empty(0, np.int64)
            self._searches[key].add([requests[number] for number in numbers])
            self._places[key] = np.concatenate((self._places[key], first + np.array(numbers)))

    def step(self, *, stream: bool) -> list[Update]:
        """Take a step of all searches, several at once where that is possible and nobody waits for each token."""
        done: dict[DecodeConfig, dict[int, Outcome]] = {}
        updates: list[Update] = []
        if len(self._searches) == 1:
            ((key, search),) = self._searches.items()
            if stream:
                found = self._batch.step(search.history.newest, search.num_candidates())
            else:
                found = take_steps(self._batch, search, self._spec.tokens.eos)
            taken = search.take(found)
            order, done[key] = taken.rows, taken.done
        else:
            order = self._take_each(done)
        if order is not None:
            self._batch.reorder(order)
        for key, search in self._searches.items():
            newest = search.history.newest.tolist() if stream and self.width == 1 else [None] * len(search.requests)
            updates += [
                Update(request, token_id, done[key].get(place))
                for place, (request, token_id) in enumerate(zip(search.requests, newest, strict=True))
                if stream or place in done[key]
            ]
        self._remove(done)
        return updates

    def _take_each(self, done: dict[DecodeConfig, dict[int, Outcome]]) -> Ids | None:
        """Ask for as many candidates as any search wants, and let each take those of its rows."""
        rows = {key: self._rows(places) for key, places in self._places.items()}
        target_ids, order = np.empty(self._batch.lengths.size, np.int64), None
        for key, search in self._searches.items():
            target_ids[rows[key]] = search.history.newest
        wanted = {key: search.num_candidates() for key, search in self._searches.items()}
        found = self._batch.step(target_ids, max(wanted.values()))
        for key, search in self._searches.items():
            some, count = rows[key], wanted[key]
            taken = search.take(
                Candidates(found.token_ids[some, :count], found.logits[some, :count], found.log_normalizer[some])
            )
            done[key] = taken.done
            if taken.rows is not None:
                order = np.arange(target_ids.size) if order is None else order
                order[some] = some[taken.rows]
        return order

    def _remove(self, done: dict[DecodeConfig, dict[int, Outcome]]) -> None:
        """Let what is done leave the batch and its search; what stays closes up in both."""
        if not any(done.values()):
            return
        leaving = np.concatenate([self._places[key][list(places)] for key, places in done.items()])
        kept = close_up(self.num_sources, leaving)
        moved_to = np.empty(self.num_sources, np.int64)
        moved_to[kept] = np.arange(kept.size)
        self._batch.remove(leaving)
        for key, places in done.items():
            stay = close_up(self._places[key].size, np.array(list(places), np.int64))
            self._places[key] = moved_to[self._places[key][stay]]
            self._searches[key].remove(stay)
            if not stay.size:
                del self._searches[key], self._places[key]
        if len(self._searches) == 1:  # then its sources are those of the batch, in the same order
            ((key, places_left),) = self._places.items()
            self._searches[key].remove(places_left.argsort())
            self._places[key] = np.arange(places_left.size)

    def _rows(self, places: Ids) -> Ids:
        rows: Ids = (places[:, None] * self.width + np.arange(self.width)).ravel()
        return rows
