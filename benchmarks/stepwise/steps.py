"""Greedy steps over a session, as decoding takes them: the newest token is the best one of the step before."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from stepwise.cells import num_steps, sources
from tfexport.runtime.session import Batch, Ids, Session


@dataclass
class Begun:
    """A batch whose first step is done, so that nothing of the encoder is still under way.

    Attributes:
        batch: of the session.
        newest: int64 [rows].
        left: steps that are left.
    """

    batch: Batch
    newest: Ids
    left: int

    def run(self) -> Ids:
        """Take all steps that are left; return their tokens, int64 [rows, steps]."""
        found = []
        while self.left:
            self.newest = self.batch.step(self.newest, 1).token_ids[:, 0]
            found.append(self.newest)
            self.left -= 1
        return np.stack(found, 1)


@dataclass(frozen=True)
class Turn:
    """What one decode took, a step.

    Attributes:
        step_ms: of wall time.
        cpu_ms: of all cores that this process had.
    """

    step_ms: float
    cpu_ms: float


def begin(session: Session, size: int) -> Begun:
    """Encode a batch and take its first step."""
    ids, mask = sources(session.spec, size)
    start, batch = session.spec.tokens.start, session.batch()
    batch.add(ids, mask, [[start]] * size)
    newest = batch.step(np.full(size, start), 1).token_ids[:, 0]
    return Begun(batch, newest, num_steps(session.spec) - 1)


def tokens(session: Session, size: int) -> list[list[int]]:
    """Decode a batch; return what each row says."""
    begun = begin(session, size)
    first = begun.newest
    found: list[list[int]] = np.concatenate((first[:, None], begun.run()), 1).tolist()
    return found


def timed(session: Session, size: int) -> Turn:
    """Decode a batch against the clock."""
    begun = begin(session, size)
    steps, wall, cpu = begun.left, time.perf_counter(), time.process_time()
    begun.run()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return Turn(1000 * wall / steps, 1000 * cpu / steps)
