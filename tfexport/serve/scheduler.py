"""Which jobs join the batches when, and what each step brings them; it belongs to one thread."""

from __future__ import annotations

import time

from tfexport.decode.loop import JOIN_SHARE, Loop, Update
from tfexport.decode.request import Request
from tfexport.errors import BackendError, DeadlineExceeded, InputError, TfexportError
from tfexport.runtime.session import Session
from tfexport.serve.config import ServingConfig
from tfexport.serve.job import Event, Job
from tfexport.serve.observer import Observer
from tfexport.serve.waiting import WaitingQueue

# Steps are taken together for so long at most: who arrives meanwhile has to wait for it.
TOGETHER_S = 0.005
# Weight of the newest step in the mean of what one takes.
NEWEST = 0.2


class Scheduler:
    """Between two steps: who is cancelled or late leaves, who waits joins as the encoder's budget allows."""

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
        self._session, self._waiting, self._config, self._observer = session, waiting, config, observer
        self._loop = Loop(session, self.slots)
        self._running: dict[int, tuple[Job, Request]] = {}  # by the identity of what the loop decodes
        self._beginning: list[Job] = []
        self._step_s = TOGETHER_S
        self._is_held = False

    @property
    def is_busy(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self._running or len(self._waiting))

    @property
    def num_rows(self) -> int:
        """Slots that are taken."""
        return self._loop.num_rows

    @property
    def jobs(self) -> list[Job]:
        """Those that run."""
        return list({id(job): job for job, _ in self._running.values()}.values())

    def step(self) -> list[Event]:
        """Let jobs leave and join, and take a step of all that run; several where nobody would see a difference.

        Raises:
            BackendError: the backend failed; then nothing that runs can go on.
        """
        now = time.monotonic()
        events = [Event(job, outcome=_late(job, "before it began")) for job in self._waiting.take_late(now)]
        events += self._leave(now)
        events += self._join()
        if self._loop.is_busy:
            events += self._take_step()
        return events

    def _leave(self, now: float) -> list[Event]:
        """Take out who is cancelled or late."""
        gone = [job for job in self.jobs if job.is_cancelled or job.deadline <= now]
        if gone:
            self._forget(gone)
        return [Event(job, outcome=_late(job, "while it was decoded")) for job in gone if not job.is_cancelled]

    def _join(self) -> list[Event]:
        """Let jobs depart from the queue and encode their sources."""
        taken = self._waiting.take(self._choose) if len(self._waiting) else []
        events: list[Event] = []
        if not taken:
            return events
        start = time.monotonic()
        for job in taken:
            job.joined = start
            self._observer.joined(start - job.arrived, job.source_length)
            try:
                job.expand(self._session)
            except (InputError, BackendError) as error:  # of this job alone: it was alone in its batch
                events.append(Event(job, outcome=error))
                continue
            self._running |= {id(part): (job, part) for part in job.parts}
            self._loop.submit(job.parts)
            self._beginning.append(job)
        self._loop.admit()
        self._observer.encoded(time.monotonic() - start)
        return events

    def _choose(self, waiting: list[Job]) -> list[Job]:
        """Pick who joins, in the order of age, as slots and budget allow; one source is always within it."""
        used = self._loop.num_rows
        free, self._is_held = self.slots - used, False
        if used and free < min(-(-self.slots // JOIN_SHARE), self._waiting.num_rows):
            return []
        chosen: list[Job] = []
        num_sources = longest = 0
        for job in waiting:
            if job.is_cancelled or not self._loop.can_join(job.width):
                continue
            if job.num_rows > free:
                break
            longest, num_sources = max(longest, job.source_length), num_sources + job.num_parts
            if chosen and longest * num_sources > self._config.encoder_budget:
                self._is_held = True
                break
            chosen.append(job)
            free -= job.num_rows
        return chosen

    def _take_step(self) -> list[Event]:
        rows, before, start = self._loop.num_rows, self._loop.num_steps, time.monotonic()
        updates = self._loop.step(1 if self._is_held else max(1, int(TOGETHER_S / self._step_s)))
        end = time.monotonic()
        if taken := self._loop.num_steps - before:
            self._step_s += NEWEST * ((end - start) / taken - self._step_s)
            self._observer.stepped(end - start, taken, rows)
        for job in self._beginning:
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
        tokens = () if update.token_id is None else (update.token_id,)
        if isinstance(update.outcome, TfexportError):
            self._forget([job])
            return Event(job, tokens, update.outcome)
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


def _late(job: Job, when: str) -> DeadlineExceeded:
    allowed = job.deadline - job.arrived
    return DeadlineExceeded(f"the {allowed:.3g} s of the request were over {when}; allow more, or come again later")
