"""Greedy search one step ahead of the host."""

from __future__ import annotations

from typing import Protocol

from tfexport.runtime.session import Ids
from tfexport.runtime.trt.resources import StepIO


class GreedyStep(Protocol):
    """What looking ahead needs of a step that takes one token a row and gives the best one."""

    capacity: int

    def feed(self, io: StepIO, target_ids: Ids, past_len: int) -> None:
        """Queue the step on tokens of the host."""
        ...

    def follow(self, io: StepIO, past_len: int, number: int) -> None:
        """Queue the step on the tokens that the newest step found best."""
        ...


class OverlappedStep:
    """Queues the next greedy step before the host has seen the tokens of this one.

    Greedy search nearly always goes on with the best token, which lies on the
    device already. So each call queues two steps, this one and the one after it,
    and waits for this one alone; while the host decides what is finished, the
    device computes. The next call finds its step under way, and checks that the
    host wants the tokens that the device went on with. If not, the step is
    dropped: its tokens were written behind the end of the cache, where the step
    that replaces it writes over them.

    Two step I/Os take turns. One is written by the host only after the step that
    used it was waited for.
    """

    def __init__(self, ios: tuple[StepIO, StepIO]) -> None:
        """Take the step I/Os of a replica, which nothing else uses while a step is under way."""
        self._ios = ios
        self._step: GreedyStep | None = None  # the one under way, in io _number, at past_len _past_len
        self._number = self._past_len = 0
        self._chosen: Ids | None = None  # best token of every row of the step before it

    def run(self, step: GreedyStep, target_ids: Ids, read: Ids, past_len: int) -> StepIO:
        """Run a greedy step and begin the next.

        Args:
            step: of any shape; one of another shape than last time is fed by the host.
            target_ids: int64 [rows, 1], those of `read` matter.
            read: rows that the host reads, int64.
            past_len: tokens in the cache of every row.

        Returns:
            The io with the results, valid until the next call.
        """
        if not self._is_under_way(step, target_ids, read, past_len):
            self.drop()
            self._number = 0
            step.feed(self._ios[0], target_ids, past_len)
        io, other = self._ios[self._number], 1 - self._number
        self._step = None
        if past_len + 1 < step.capacity:
            step.follow(self._ios[other], past_len + 1, other)
            self._step, self._number, self._past_len = step, other, past_len + 1
        io.wait()
        self._chosen = io.token_ids[: target_ids.size].copy()
        return io

    def drop(self) -> None:
        """Wait for the step under way, if there is one, and forget it: both ios are free afterwards."""
        if self._step is not None:
            self._ios[self._number].wait()
            self._step = None

    def _is_under_way(self, step: GreedyStep, target_ids: Ids, read: Ids, past_len: int) -> bool:
        if self._step is not step or self._past_len != past_len or self._chosen is None:
            return False
        return bool((target_ids[read, 0] == self._chosen[read]).all())
