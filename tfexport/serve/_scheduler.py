"""Queue requests, admit them to the running batches, and decode on a thread."""

from __future__ import annotations

import copy
import logging
import math
import sys
import threading
import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

from tfexport.decode.loop import JOIN_SHARE, Loop, Update
from tfexport.decode.request import Request, Status
from tfexport.errors import BackendError, EngineFailed, InputError, QueueFull, ServingError, TfexportError
from tfexport.runtime.session import Session
from tfexport.runtime.sources import Sources
from tfexport.serve import _encoder
from tfexport.serve._encoder import Encoder
from tfexport.serve._generation import AnyGeneration as Job
from tfexport.serve._generation import Event
from tfexport.serve.config import ServingConfig
from tfexport.serve.observer import Observer

logger = logging.getLogger(__name__)
IDLE_S = 0.5  # an idle thread reports that it is alive at least this often
# Several steps run in one call for at most this time, because arriving requests have to wait for the call. Sources are
# encoded for at most the same time, because running requests have to wait.
TOGETHER_S = 0.005
LEAST_BUDGET = 128  # source tokens that may be encoded between two steps, whatever their time
NEWEST = 0.2  # weight of the newest step or encoder run in the moving average of times
HELD_STEPS = 8  # maximum steps that free slots wait, so that several requests join together
RATE_WINDOW = 64  # departures that the queue's rate is estimated from
MAX_RETRY_AFTER_S = 60
Emit: TypeAlias = Callable[[list[Event]], None]
Fail: TypeAlias = Callable[[EngineFailed], None]


class WaitingQueue:
    """A bounded, thread-safe queue of generations; priorities count as seconds of age."""

    def __init__(self, max_jobs: int, max_tokens: int) -> None:
        # `max_tokens` does not apply to a single job.
        self._max_jobs, self._max_tokens = max_jobs, max_tokens
        self._jobs: list[Job] = []
        self._unread: set[Job] = set()  # accepted, but their sources are still being read
        self.num_rows = self._num_tokens = 0
        self._departed: deque[float] = deque(maxlen=RATE_WINDOW)
        self._closed: ServingError | None = None
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def num_unread(self) -> int:
        return len(self._unread)

    def expect(self, job: Job) -> None:
        """Accept a job that `put` adds later, even if the queue is closed meanwhile."""
        with self._changed:
            self.check_open()
            self._check_room(0)
            self._unread.add(job)

    def put(self, job: Job) -> None:
        with self._changed:
            if job in self._unread:
                self._unread.remove(job)
            else:
                self.check_open()
            if not self._jobs:  # the rate is measured only while jobs wait
                self._departed.clear()
            self._check_room(job.source_length * job.num_sources)
            insort(self._jobs, job, key=lambda job: job.arrived - job.priority)
            self._count(job, 1)
            self._changed.notify()

    def check_open(self) -> None:
        if self._closed:
            raise copy.copy(self._closed)  # raising the same error repeatedly would extend its traceback

    def cancel(self, job: Job) -> bool:
        """Cancel a job; return whether it was waiting."""
        with self._changed:  # `take` sets the status too
            job.status = Status.CANCELLED
            self._unread.discard(job)
            self._changed.notify()
            return self._take_out(job)

    def take(self, choose: Callable[[list[Job]], list[Job]]) -> list[Job]:
        """Remove the jobs that `choose` selects, and mark them as running."""
        with self._changed:
            chosen = choose(self._jobs)
            for job in chosen:
                self._take_out(job)
                job.status = Status.RUNNING
                self._departed.append(time.monotonic())
            return chosen

    def take_late(self, now: float) -> list[Job]:
        with self._changed:
            late = [job for job in self._jobs if job.deadline <= now]
            for job in late:
                self._take_out(job)
            return late

    def wait(self, timeout_s: float) -> bool:
        """Wait for a job, `close` or the timeout; return False when no job can come."""
        with self._changed:
            if not self._jobs and (self._unread or not self._closed):
                self._changed.wait(timeout_s)
            return bool(self._jobs or self._unread) or self._closed is None

    def close(self, reason: ServingError) -> None:
        """Refuse new jobs with this error; waiting jobs remain."""
        with self._changed:
            self._closed = self._closed or reason
            self._changed.notify()

    def _check_room(self, num_tokens: int) -> None:
        num_jobs = len(self._jobs) + len(self._unread)
        if num_jobs >= self._max_jobs or (self._jobs and self._num_tokens + num_tokens > self._max_tokens):
            got = f"{num_jobs} requests with {self._num_tokens} source tokens are waiting"
            problem = f"{got}, the limits are {self._max_jobs} and {self._max_tokens}; try again later"
            raise QueueFull(problem, retry_after_s=self._retry_after_s())

    def _take_out(self, job: Job) -> bool:
        if job not in self._jobs:
            return False
        self._jobs.remove(job)
        self._count(job, -1)
        return True

    def _count(self, job: Job, sign: int) -> None:
        self.num_rows += sign * job.num_rows
        self._num_tokens += sign * job.source_length * job.num_sources

    def _retry_after_s(self) -> int:
        # The estimated seconds until half of the queue has left.
        if len(self._departed) < 2:
            return 1
        took = time.monotonic() - self._departed[0]
        return min(MAX_RETRY_AFTER_S, max(1, math.ceil(len(self._jobs) / 2 * took / len(self._departed))))


class Scheduler:
    """Add and remove jobs between decoder steps; used on one thread only."""

    def __init__(self, session: Session, waiting: WaitingQueue, config: ServingConfig, observer: Observer) -> None:
        most = session.limits.rows.most
        self.slots = config.slots if most is None else min(config.slots, most)
        self.num_rows = 0  # after the newest step, including jobs that are not encoded yet
        self._session, self._waiting, self._observer = session, waiting, observer
        # If later jobs cannot join the batch, all waiting jobs are encoded together.
        can_join = session.spec.has_decoder and session.batch().can_join
        self._fixed_budget = config.encoder_budget if can_join else sys.maxsize
        self._loop, self._encoder = Loop(session, self.slots), Encoder(session)
        self._running: dict[int, tuple[Job, Request]] = {}  # by the id of the part
        self._entering: deque[Request] = deque()  # running parts that are not encoded yet
        self._beginning: set[Job] = set()  # jobs that get their first token in the next step
        self._held_at: int | None = None  # number of steps when free slots began to wait for more
        self._step_s, self._token_s = TOGETHER_S, TOGETHER_S / LEAST_BUDGET
        self._is_held = False

    @property
    def is_busy(self) -> bool:
        return bool(self._running or self._encoder.requests or len(self._waiting))

    @property
    def _budget(self) -> int:
        """Number of source tokens, including padding, to encode between two steps."""
        return self._fixed_budget or max(LEAST_BUDGET, int(TOGETHER_S / self._token_s))

    def step(self) -> list[Event]:
        now = time.monotonic()
        events = [Event(job, outcome=job.late()) for job in self._waiting.take_late(now)]
        events += self._remove(now)
        events += self._add()
        if self._loop.is_busy:
            events += self._take_step()
        self.num_rows = self._count_rows()
        return events

    def close(self) -> None:
        self._encoder.close()

    def _remove(self, now: float) -> list[Event]:
        running = dict.fromkeys(job for job, _ in self._running.values())
        ended = [job for job in running if job.status is Status.CANCELLED or job.deadline <= now]
        if ended:
            self._forget(ended)
        return [Event(job, outcome=job.late()) for job in ended if job.status is not Status.CANCELLED]

    def _add(self) -> list[Event]:
        if self._encoder.requests and (self._encoder.is_done or not self._loop.is_busy):
            self._join(*self._encoder.take())
        start, events, before = time.monotonic(), list[Event](), 0
        self._is_held = False
        if not self._entering and not self._encoder.requests and len(self._waiting):
            for job in self._waiting.take(self._choose):
                job.joined = start
                self._observer.joined(start - job.arrived, job.source_length)
                if job.is_encoded_before:
                    before += job.source_length
                try:
                    job.expand(self._session)
                except (InputError, BackendError) as error:  # only this job fails
                    events.append(Event(job, outcome=error))
                    continue
                if job.streams_later:
                    events.append(Event(job, job.request.prompt[1:]))
                self._running |= {part.id: (job, part) for part in job.parts}
                self._entering += job.parts
        if not self._encoder.requests and (parts := self._take_entering(before)):
            if self._encoder.has_core and self._loop.num_rows:
                self._encode_ahead(parts)
            else:
                self._begin(parts)
                self._loop.submit(parts)
                self._loop.admit()
                self._note_encoded(parts, time.monotonic() - start, before)
        self._is_held = self._is_held or bool(self._entering)
        return events

    def _encode_ahead(self, parts: Sequence[Request]) -> None:
        answered = [part for part in parts if part.is_answered]
        self._begin(answered)
        self._loop.submit(answered)
        if rest := [part for part in parts if not part.is_answered]:
            self._encoder.begin(rest, self._token_s * _num_tokens(rest))

    def _join(self, parts: Sequence[Request], sources: Sources, took_s: float) -> None:
        self._note_encoded(parts, took_s)
        ended = [part for part in parts if part.id not in self._running]
        if len(ended) < len(parts):
            self._begin(parts)
            self._loop.join(parts, sources)
            self._loop.cancel(ended)

    def _begin(self, parts: Sequence[Request]) -> None:
        for part in parts:
            if (running := self._running.get(part.id)) and math.isnan(running[0].began):
                self._beginning.add(running[0])

    def _note_encoded(self, parts: Sequence[Request], took_s: float, before: int = 0) -> None:
        self._token_s += NEWEST * (took_s / (_num_tokens(parts) + before) - self._token_s)
        self._observer.encoded(took_s)

    def _choose(self, waiting: list[Job]) -> list[Job]:
        """Select the oldest jobs that fit; the first may exceed the encoder's budget."""
        free, budget = self.slots - self._count_rows(), self._budget
        if self._wait_for_slots(free):
            return []
        chosen: list[Job] = []
        num_sources = longest = 0
        for job in waiting:
            if not self._loop.can_join(job.width):
                continue
            if job.num_rows > free:
                break
            longest = max(longest, job.source_length)
            if chosen and longest * (num_sources + 1) > budget:
                self._is_held = True
                break
            chosen.append(job)
            free -= job.num_rows
            num_sources += job.num_sources
        return chosen

    def _wait_for_slots(self, free: int) -> bool:
        enough = min(-(-self.slots // JOIN_SHARE), self._waiting.num_rows)
        if free == self.slots or not 0 < free < enough:
            self._held_at = None
            return free == 0
        if self._held_at is None:
            self._held_at = self._loop.num_steps
        return self._loop.num_steps - self._held_at < HELD_STEPS

    def _take_entering(self, before: int) -> list[Request]:
        """Take sources to encode, at least one if no tokens were encoded `before`."""
        parts: list[Request] = []
        longest, budget = 0, self._budget - before
        while self._entering:
            longest = max(longest, self._entering[0].source_length)
            if (parts or before) and longest * (len(parts) + 1) > budget:
                break
            if parts and self._encoder.is_usable and self._entering[0].config.num_beams != parts[0].config.num_beams:
                break
            parts.append(self._entering.popleft())
        return parts

    def _take_step(self) -> list[Event]:
        rows, before, start = self._loop.num_rows, self._loop.num_steps, time.monotonic()
        together_s = 0.0 if self._is_held else TOGETHER_S
        if self._encoder.requests:
            together_s = min(self._encoder.left_s, TOGETHER_S)
        updates = self._loop.step(max(1, int(together_s / self._step_s)))
        end = time.monotonic()
        if num_steps := self._loop.num_steps - before:
            self._step_s += NEWEST * ((end - start) / num_steps - self._step_s)
            self._observer.stepped(end - start, num_steps, rows)
        for job in self._beginning:
            job.began = end
            self._observer.began(end - job.arrived)
        self._beginning.clear()
        return [event for update in updates if (event := self._event(update))]

    def _event(self, update: Update) -> Event | None:
        if update.request.id not in self._running:  # another part of its job failed in this step
            return None
        job, part = self._running[update.request.id]
        if isinstance(update.outcome, TfexportError):
            self._forget([job])
            return Event(job, outcome=update.outcome)
        tokens = () if update.token_id is None else (update.token_id,)
        if update.outcome is None:
            return Event(job, tokens)
        del self._running[part.id]
        hypotheses = job.take(part, update.outcome)
        return Event(job, tokens, hypotheses) if tokens or hypotheses is not None else None

    def _forget(self, jobs: list[Job]) -> None:
        parts = [part for job in jobs for part in job.parts]
        self._loop.cancel(parts)
        for part in parts:
            self._running.pop(part.id, None)
        self._entering = deque(part for part in self._entering if part.id in self._running)

    def _count_rows(self) -> int:
        return sum(job.width for job, _ in self._running.values())


def _num_tokens(parts: Sequence[Request]) -> int:
    return max(part.source_length for part in parts) * len(parts)


class Worker:
    """Decode queued requests on a thread until the queue is closed."""

    def __init__(self, session: Session, config: ServingConfig, observer: Observer, emit: Emit, fail: Fail) -> None:
        self.waiting = WaitingQueue(config.max_waiting, config.max_waiting_tokens)
        self.failure: BaseException | None = None  # the error that ended the thread
        self._scheduler = Scheduler(session, self.waiting, config, observer)
        self.slots = self._scheduler.slots
        self._emit, self._fail = emit, fail
        self._idle_s = min(IDLE_S, config.stall_s / 2)
        self._is_aborted = False
        self._alive_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="tfexport-engine", daemon=True)
        self._thread.start()

    @property
    def num_rows(self) -> int:
        return self._scheduler.num_rows if self._thread.is_alive() else 0

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self._alive_at if self._thread.is_alive() else 0.0

    def abort(self, reason: ServingError) -> None:
        """Close the queue and stop before the next step, without further events."""
        self._is_aborted = True
        self.waiting.close(reason)

    def join(self, timeout_s: float | None = None) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _step(self) -> None:
        # Local variables of `_run` would keep the last generations and their engine alive.
        if events := self._scheduler.step():
            self._emit(events)

    def _run(self) -> None:
        try:
            while not self._is_aborted:
                self._alive_at = time.monotonic()
                if self._scheduler.is_busy:
                    _encoder.COMPUTING.add(self)
                    self._step()
                else:
                    _encoder.COMPUTING.discard(self)
                    if not self.waiting.wait(self._idle_s):
                        return
        except BaseException as error:  # callers must receive an error in any case
            logger.exception("the engine's thread has failed")
            self.failure = error
            failed = EngineFailed(f"the engine has failed: {str(error) or type(error).__name__}; restart it")
            self.waiting.close(failed)
            self._fail(failed)
        finally:
            _encoder.COMPUTING.discard(self)
            self._scheduler.close()
