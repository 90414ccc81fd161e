"""A session that notes how long each call into another one takes."""

from __future__ import annotations

import time
from array import array

import numpy as np

from tfexport.runtime.session import Batch, Candidates, Floats, Ids, Mask, MultiStep, Prompts, Session

# Steps that a batch takes together are timed together, so many at once: few enough to tell positions apart.
STEPS_TOGETHER = 16


class TimedSession:
    """Passes every call on and notes its time, so that decoding needs no clock of its own.

    Not to be shared between threads.

    Attributes:
        spec: of the session inside.
        backend: of the session inside.
        accuracy: of the session inside.
        limits: of the session inside.
        encode_s: seconds since `restart` in which sources joined: encoding, and reading prompts.
        reorder_s: seconds since `restart` in which rows moved: as beams branched, and as sources left.
        step_s: seconds of each step since `restart`.
        first_step_ended: when the first step since `restart` returned; 0 before that.
    """

    def __init__(self, session: Session) -> None:
        """Wrap a session."""
        self._session = session
        self.spec, self.backend = session.spec, session.backend
        self.accuracy, self.limits = session.accuracy, session.limits
        self.restart()

    def restart(self) -> None:
        """Forget what was noted."""
        self.encode_s = self.reorder_s = self.first_step_ended = 0.0
        self.step_s = array("d")

    def batch(self, width: int = 1) -> TimedBatch:
        """Return an empty batch that is timed, with several steps in one call if it can take them."""
        batch = self._session.batch(width)
        return TimedMultiStep(self, batch, batch) if isinstance(batch, MultiStep) else TimedBatch(self, batch)

    def hidden_states(self, source_ids: Ids, source_mask: Mask) -> Floats:
        """Encode with an encoder alone, untimed; see `Session.hidden_states`."""
        return self._session.hidden_states(source_ids, source_mask)

    def close(self) -> None:
        """Close the session inside."""
        self._session.close()


class TimedBatch:
    """A batch whose session notes the time of every call.

    Attributes:
        width: of the batch inside.
        can_join: of the batch inside.
    """

    def __init__(self, session: TimedSession, batch: Batch) -> None:
        """Wrap a batch."""
        self.width, self.can_join = batch.width, batch.can_join
        self._times, self._batch = session, batch

    @property
    def lengths(self) -> Ids:
        """Tokens in the cache of every row; see `Batch`."""
        return self._batch.lengths

    def add(self, source_ids: Ids, source_mask: Mask, prompts: Prompts) -> None:
        """Let sources join; see `Batch.add`."""
        began = time.perf_counter()
        self._batch.add(source_ids, source_mask, prompts)
        self._times.encode_s += time.perf_counter() - began

    def step(self, target_ids: Ids, num_candidates: int) -> Candidates:
        """Read one token of every row; see `Batch.step`."""
        began = time.perf_counter()
        found = self._batch.step(target_ids, num_candidates)
        ended = time.perf_counter()
        self._times.step_s.append(ended - began)
        self._times.first_step_ended = self._times.first_step_ended or ended
        return found

    def reorder(self, rows: Ids) -> None:
        """Let rows continue others; see `Batch.reorder`."""
        began = time.perf_counter()
        self._batch.reorder(rows)
        self._times.reorder_s += time.perf_counter() - began

    def remove(self, sources: Ids) -> None:
        """Let sources leave; see `Batch.remove`."""
        began = time.perf_counter()
        self._batch.remove(sources)
        self._times.reorder_s += time.perf_counter() - began


class TimedMultiStep(TimedBatch):
    """One that takes several steps in one call; of those taken together, each counts the mean."""

    def __init__(self, session: TimedSession, batch: Batch, stepper: MultiStep) -> None:
        """Wrap a batch, known as what takes several steps too."""
        super().__init__(session, batch)
        self._stepper = stepper

    def multi_step(self, target_ids: Ids, num_candidates: int, steps: int, stop_ids: frozenset[int]) -> Candidates:
        """Take greedy steps, the first alone; see `MultiStep.multi_step`."""
        first = self.step(target_ids, num_candidates)
        parts = [Candidates(first.token_ids[None], first.logits[None], first.log_normalizer[None])]
        left = steps - 1
        while left and stop_ids.isdisjoint((best := parts[-1].token_ids[-1, :, 0]).tolist()):
            began = time.perf_counter()
            part = self._stepper.multi_step(best, num_candidates, min(left, STEPS_TOGETHER), stop_ids)
            taken = len(part.token_ids)
            self._times.step_s.extend([(time.perf_counter() - began) / taken] * taken)
            parts.append(part)
            left -= taken
        return Candidates(
            np.concatenate([part.token_ids for part in parts]),
            np.concatenate([part.logits for part in parts]),
            np.concatenate([part.log_normalizer for part in parts]),
        )
