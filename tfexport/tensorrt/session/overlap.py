"""The step that overlaps the host: begun with the tokens that the device found best, before anybody has seen them."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from tfexport.runtime.session import Ids
from tfexport.tensorrt.session.step import Sizes, StepIO


class GreedyStep(Protocol):
    """What overlapping needs of a step that takes one token a row."""

    sizes: Sizes

    def feed(self, io: StepIO, target_ids: Ids, lengths: Ids) -> None:
        """Queue the step on tokens of the host."""
        ...

    def follow(self, io: StepIO, lengths: Ids, number: int) -> None:
        """Queue the step on the tokens that the newest step found best."""
        ...

    def best(self, io: StepIO) -> Ids:
        """Copy out the best token of every row."""
        ...


# Steps in a row whose best tokens were all taken, after which the next one is begun ahead although other tokens were
# asked for too. One that is begun in vain costs a whole step, one that is not begun the time of the host between two.
SURE_AFTER = 8


class OverlappedStep:
    """Queues the next step before the host has seen the tokens of this one.

    Greedy search nearly always goes on with the best token, which lies on the
    device already. So a call can queue two steps, this one and the one after it,
    and wait for this one alone; while the host decides what is finished, the
    device computes. The next call finds its step under way, and checks that the
    host wants the tokens that the device went on with. If not, the step is
    dropped: its tokens were written behind the end of the cache, where the step
    that replaces it writes over them.

    Who asks for one candidate goes on with it. Who asks for several may filter,
    sample or search with beams; the next step is begun when it went on with the
    best ones for a while.

    Two step I/Os take turns. One is written by the host only after the step that
    used it was waited for.
    """

    def __init__(self, ios: tuple[StepIO, StepIO]) -> None:
        """Take the step I/Os of a replica, which nothing else uses while a step is under way."""
        self._ios = ios
        self._step: GreedyStep | None = None  # the one under way, in io _number, behind _lengths tokens
        self._number = 0
        self._lengths: Ids = np.empty(0, np.int64)
        self._chosen: Ids = self._lengths  # best token of every row of the step before it
        self._taken = 0  # steps in a row whose best tokens were taken

    def run(self, step: GreedyStep, target_ids: Ids, read: Ids, lengths: Ids) -> StepIO:
        """Run a step and, where it is sure enough, begin the next.

        Args:
            step: of any shape; one of another shape than last time is fed by the host.
            target_ids: int64 [rows], those of `read` matter.
            read: rows that the host reads, int64.
            lengths: tokens in the cache of every row, int64 [rows]; 0 where nobody reads.

        Returns:
            The step I/O with the results, valid until the next call.
        """
        if not self._is_under_way(step, target_ids, read, lengths):
            self._wait()
            self._number = 0
            step.feed(self._ios[0], target_ids, lengths)
        io, other = self._ios[self._number], 1 - self._number
        self._step = None
        following = np.zeros_like(lengths)  # rows that nobody reads stay at 0
        following[read] = lengths[read] + 1
        is_sure = step.sizes.num_candidates == 1 or self._taken >= SURE_AFTER
        if is_sure and following.max() < step.sizes.capacity:
            step.follow(self._ios[other], following, other)
            self._step, self._number, self._lengths = step, other, following
        io.wait()
        self._chosen = step.best(io)
        return io

    def drop(self) -> None:
        """Wait for the step under way, if there is one, and forget what rows went on with: both I/Os are free."""
        self._wait()
        self._taken, self._chosen = 0, np.empty(0, np.int64)

    def _wait(self) -> None:
        if self._step is not None:
            self._ios[self._number].wait()
            self._step = None

    def _is_under_way(self, step: GreedyStep, target_ids: Ids, read: Ids, lengths: Ids) -> bool:
        is_taken = self._chosen.size == target_ids.size and bool((target_ids[read] == self._chosen[read]).all())
        self._taken = self._taken + 1 if is_taken else 0
        return is_taken and self._step is step and bool((lengths[read] == self._lengths[read]).all())
