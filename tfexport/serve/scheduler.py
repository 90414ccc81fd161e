"""Which jobs join the batches when, and what each step brings them; it belongs to one thread."""

from __future__ import annotations

import math
import sys
import time
from collections import deque

from tfexport.decode.loop import JOIN_SHARE, Loop, Update
from tfexport.decode.request import Request
from tfexport.errors import BackendError, InputError, TfexportError
from tfexport.runtime.session import Session
from tfexport.serve.config import ServingConfig
from tfexport.serve.job import Event, Job
from tfexport.serve.observer import Observer
from tfexport.serve.waiting import WaitingQueue

# Steps are taken together for so long at most: who arrives meanwhile has to wait for it.
TOGETHER_S = 0.005
# Weight of the newest step in the mean of what one takes.
NEWEST = 0.2
# Steps that free slots wait for company at most before somebody joins alone.
HELD_STEPS = 8


class Scheduler:
    """Between two steps: who is cancelled or late leaves, who waits joins as the encoder's budget allows.

    Attributes:
        slots: rows that are decoded at once.
        num_rows: slots that were taken after the newest step, also by what is still to be encoded.
    """

    def __init__(self, session: Session, waiting: WaitingQueue, config: ServingConfig, observer: Observer) -> None:
        """Begin without a job.

        Args:
            session: any backend.
            waiting: where jobs come from.
            config: slots and budget.
            observer: told of each step.
        """
        most = session.limits.rows.most
        self.slots = config.slots if most is None else min(config.slots, most)
        self.num_rows = 0
        self._session, self._waiting, self._observer = session, waiting, observer
        # Where nobody can join later, all that waits is encoded together.
        self._budget = config.encoder_budget if session.batch().can_join else sys.maxsize
        self._loop = Loop(session, self.slots)
        self._running: dict[int, tuple[Job, Request]] = {}  # by the identity of what is decoded
        self._entering: deque[Request] = deque()  # of these, those that are still to be encoded
        self._beginning: dict[int, Job] = {}  # those that will have their first token, by identity
        self._held_at: int | None = None  # number of steps when free slots began to wait for company
        self._step_s = TOGETHER_S
        self._is_held = False

    @property
    def is_busy(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self._running or len(self._waiting))

    def step(self) -> list[Event]:
        """Let jobs leave and join, and take a step of all that run; several where nobody would see a difference.

        Raises:
            BackendError: the backend failed; then nothing that runs can go on.
        """
        now = time.monotonic()
        events = [Event(job, outcome=job.late()) for job in self._waiting.take_late(now)]
        events += self._leave(now)
        events += self._join()
        if self._loop.is_busy:
            events += self._take_step()
        self.num_rows = self._count_rows()
        return events

    def _leave(self, now: float) -> list[Event]:
        """Take out who is cancelled or late."""
        running = {id(job): job for job, _ in self._running.values()}.values()
        gone = [job for job in running if job.is_cancelled or job.deadline <= now]
        if gone:
            self._forget(gone)
        return [Event(job, outcome=job.late()) for job in gone if not job.is_cancelled]

    def _join(self) -> list[Event]:
        """Let jobs depart from the queue, and encode sources as far as the budget reaches."""
        start, events, budget = time.monotonic(), list[Event](), self._budget
        self._is_held = False
        if not self._entering and len(self._waiting):
            for job in self._waiting.take(self._choose):
                job.joined = start
                self._observer.joined(start - job.arrived, job.source_length)
                if job.request.config.return_alternatives:
                    budget -= job.source_length  # encoded once more, to find them
                try:
                    job.expand(self._session)
                except (InputError, BackendError) as error:  # of this job alone: it was alone in its batch
                    events.append(Event(job, outcome=error))
                    continue
                self._running |= {id(part): (job, part) for part in job.parts}
                self._entering += job.parts
        if parts := self._take_entering(budget):
            self._loop.submit(parts)
            self._loop.admit()
            self._observer.encoded(time.monotonic() - start)
        self._is_held = self._is_held or bool(self._entering)
        return events

    def _choose(self, waiting: list[Job]) -> list[Job]:
        """Pick who joins, in the order of age, as slots and budget allow; the last one may go beyond the budget."""
        free = self.slots - self._count_rows()
        if self._wait_for_company(free):
            return []
        chosen: list[Job] = []
        num_sources = longest = 0
        for job in waiting:
            if job.is_cancelled or not self._loop.can_join(job.width):
                continue
            if job.num_rows > free:
                break
            longest = max(longest, job.source_length)
            if chosen and longest * (num_sources + 1) > self._budget:
                self._is_held = True
                break
            chosen.append(job)
            free -= job.num_rows
            num_sources += job.num_sources
        return chosen

    def _wait_for_company(self, free: int) -> bool:
        """Say whether the free slots are so few that it is better to wait for more, which is done for some steps."""
        few = min(-(-self.slots // JOIN_SHARE), self._waiting.num_rows)
        if free == self.slots or not 0 < free < few:
            self._held_at = None
            return free == 0
        if self._held_at is None:
            self._held_at = self._loop.num_steps
        return self._loop.num_steps - self._held_at < HELD_STEPS

    def _take_entering(self, budget: int) -> list[Request]:
        """Take what is encoded before the next step: one source at least, unless others were."""
        parts: list[Request] = []
        longest = 0
        while self._entering:
            longest = max(longest, len(self._entering[0].source_ids))
            if (parts or budget < self._budget) and longest * (len(parts) + 1) > budget:
                break
            part = self._entering.popleft()
            job, _ = self._running[id(part)]
            if math.isnan(job.began):
                self._beginning[id(job)] = job
            parts.append(part)
        return parts

    def _take_step(self) -> list[Event]:
        rows, before, start = self._loop.num_rows, self._loop.num_steps, time.monotonic()
        updates = self._loop.step(1 if self._is_held else max(1, int(TOGETHER_S / self._step_s)))
        end = time.monotonic()
        if taken := self._loop.num_steps - before:
            self._step_s += NEWEST * ((end - start) / taken - self._step_s)
            self._observer.stepped(end - start, taken, rows)
        for job in self._beginning.values():
            job.began = end
            self._observer.began(end - job.arrived)
        self._beginning.clear()
        return [event for update in updates if (event := self._event(update))]

    def _event(self, update: Update) -> Event | None:
        """Tell of an update; None where it finishes only a part of a job."""
        found = self._running.get(id(update.request))
        if found is None:  # another part of its job has failed in this very step
            return None
        job, part = found
        if isinstance(update.outcome, TfexportError):
            self._forget([job])
            return Event(job, outcome=update.outcome)
        tokens = () if update.token_id is None else (update.token_id,)
        if update.outcome is None:
            return Event(job, tokens)
        del self._running[id(part)]
        whole = job.take(part, update.outcome)
        return Event(job, tokens, whole) if tokens or whole is not None else None

    def _forget(self, jobs: list[Job]) -> None:
        parts = [part for job in jobs for part in job.parts]
        self._loop.cancel(parts)
        for part in parts:
            self._running.pop(id(part), None)
        self._entering = deque(part for part in self._entering if id(part) in self._running)

    def _count_rows(self) -> int:
        return sum(job.width for job, _ in self._running.values())
