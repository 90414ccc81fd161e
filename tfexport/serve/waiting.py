"""The queue in front of the batches: bounded, in the order of age, shared between threads."""

from __future__ import annotations

import copy
import math
import threading
import time
from bisect import insort
from collections import deque
from collections.abc import Callable

from tfexport.errors import QueueFull, ServingError
from tfexport.serve.job import Job

# Departures that the rate of the queue is estimated from.
RATE_WINDOW = 64
MAX_RETRY_AFTER_S = 60


class WaitingQueue:
    """Jobs that have not joined a batch yet, oldest first; a priority counts as seconds of age, so nobody starves."""

    def __init__(self, max_jobs: int, max_tokens: int) -> None:
        """Begin empty and open.

        Args:
            max_jobs: that wait at most.
            max_tokens: of their sources at most; a single job may always wait.
        """
        self._max_jobs, self._max_tokens = max_jobs, max_tokens
        self._jobs: list[Job] = []
        self._num_rows = self._num_tokens = 0
        self._departed: deque[float] = deque(maxlen=RATE_WINDOW)
        self._closed: ServingError | None = None
        self._changed = threading.Condition()

    def __len__(self) -> int:
        """Jobs that wait."""
        return len(self._jobs)

    @property
    def num_rows(self) -> int:
        """Slots that those who wait will take."""
        return self._num_rows

    @property
    def is_closed(self) -> bool:
        """Whether nobody may join any more."""
        return self._closed is not None

    def put(self, job: Job) -> None:
        """Let a job wait.

        Raises:
            QueueFull: too many wait; it says when to come again.
            ServingError: what `close` was given.
        """
        with self._changed:
            self.check_open()
            if not self._jobs:
                self._departed.clear()  # what left before anybody had to wait says nothing of how long one waits
            tokens = self._num_tokens + job.source_length * job.num_sources
            if len(self._jobs) >= self._max_jobs or (self._jobs and tokens > self._max_tokens):
                raise QueueFull(
                    f"{len(self._jobs)} requests with {self._num_tokens} source tokens wait, the limits are "
                    f"{self._max_jobs} and {self._max_tokens}; come again later",
                    retry_after_s=self._retry_after_s(),
                )
            insort(self._jobs, job, key=_age)
            self._count(job, 1)
            self._changed.notify()

    def check_open(self) -> None:
        """Refuse who comes when nobody may join any more.

        Raises:
            ServingError: what `close` was given.
        """
        if self._closed:
            raise copy.copy(self._closed)  # one that is raised again and again keeps what raised it, each time

    def remove(self, job: Job) -> bool:
        """Take a job out; say whether it was there."""
        with self._changed:
            if job not in self._jobs:
                return False
            self._jobs.remove(job)
            self._count(job, -1)
            return True

    def take(self, choose: Callable[[list[Job]], list[Job]]) -> list[Job]:
        """Let jobs depart: those that `choose` picks of all, oldest first."""
        with self._changed:
            return self._depart(choose(self._jobs))

    def take_late(self, now: float) -> list[Job]:
        """Take out whose deadline is over."""
        with self._changed:
            late = [job for job in self._jobs if job.deadline <= now]
            for job in late:
                self._jobs.remove(job)
                self._count(job, -1)
            return late

    def wait(self, timeout_s: float) -> None:
        """Sleep until something waits, the queue is closed, or the time is over."""
        with self._changed:
            if not self._jobs and not self._closed:
                self._changed.wait(timeout_s)

    def close(self, reason: ServingError) -> None:
        """Let nobody join any more, for this reason; who waits goes on waiting."""
        with self._changed:
            self._closed = self._closed or reason
            self._changed.notify()

    def _depart(self, jobs: list[Job]) -> list[Job]:
        if jobs:
            chosen = set(map(id, jobs))
            self._jobs = [job for job in self._jobs if id(job) not in chosen]
            now = time.monotonic()
            for job in jobs:
                self._count(job, -1)
                self._departed.append(now)
        return jobs

    def _count(self, job: Job, sign: int) -> None:
        self._num_rows += sign * job.num_rows
        self._num_tokens += sign * job.source_length * job.num_sources

    def _retry_after_s(self) -> int:
        """Estimate when half of the queue will be gone, in whole seconds, at least one."""
        if len(self._departed) < 2:
            return 1
        took = time.monotonic() - self._departed[0]
        return min(MAX_RETRY_AFTER_S, max(1, math.ceil(len(self._jobs) / 2 * took / len(self._departed))))


def _age(job: Job) -> float:
    return job.arrived - job.priority
