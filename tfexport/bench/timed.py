"""A session that notes how long each call into another one takes."""

from __future__ import annotations

import time
from array import array
from typing import Generic

import numpy as np

from tfexport.runtime.session import Candidates, Floats, Ids, Mask, RunsAhead, S, Session
from tfexport.spec import ModelSpec

# Steps that a session takes ahead are timed together, so many at once: few enough to tell positions apart.
STEPS_AHEAD = 16


def timed(session: Session[S]) -> TimedSession[S]:
    """Wrap a session in one that notes times, and runs ahead if it does."""
    return TimedRunner(session) if isinstance(session, RunsAhead) else TimedSession(session)


class TimedSession(Generic[S]):
    """Passes every call on and notes its time, so that decoding needs no clock of its own.

    Not to be shared between threads.

    Attributes:
        spec: of the session inside.
        backend: of the session inside.
        accuracy: of the session inside.
        max_rows: of the session inside.
        max_candidates: of the session inside.
        encode_s: seconds spent encoding since `restart`.
        reorder_s: seconds spent reordering rows since `restart`.
        step_s: seconds of each step since `restart`.
        first_step_ended: when the first step since `restart` returned; 0 before that.
    """

    def __init__(self, session: Session[S]) -> None:
        """Wrap a session."""
        self._session = session
        self.spec: ModelSpec = session.spec
        self.backend: str = session.backend
        self.accuracy = session.accuracy
        self.max_rows = session.max_rows
        self.max_candidates = session.max_candidates
        self.restart()

    def restart(self) -> None:
        """Forget what was noted."""
        self.encode_s = self.reorder_s = self.first_step_ended = 0.0
        self.step_s = array("d")

    def encode(self, source_ids: Ids, source_mask: Mask) -> S:
        """Encode a batch; see `Session.encode`."""
        began = time.perf_counter()
        state = self._session.encode(source_ids, source_mask)
        self.encode_s += time.perf_counter() - began
        return state

    def step(self, state: S, target_ids: Ids, num_candidates: int) -> Candidates:
        """Run the decoder; see `Session.step`."""
        began = time.perf_counter()
        found = self._session.step(state, target_ids, num_candidates)
        ended = time.perf_counter()
        self.step_s.append(ended - began)
        self.first_step_ended = self.first_step_ended or ended
        return found

    def reorder(self, state: S, rows: Ids) -> None:
        """Reorder the rows; see `Session.reorder`."""
        began = time.perf_counter()
        self._session.reorder(state, rows)
        self.reorder_s += time.perf_counter() - began

    def hidden_states(self, source_ids: Ids, source_mask: Mask) -> Floats:
        """Encode with an encoder alone, untimed; see `Session.hidden_states`."""
        return self._session.hidden_states(source_ids, source_mask)

    def close(self) -> None:
        """Close the session inside."""
        self._session.close()


class TimedRunner(TimedSession[S]):
    """One whose session runs ahead; of the steps that it takes together, each counts the mean."""

    def ahead(self, state: S, target_ids: Ids, num_candidates: int, steps: int, stop_id: int) -> Candidates:
        """Take greedy steps, the first alone; see `RunsAhead.ahead`."""
        assert isinstance(self._session, RunsAhead)
        first = self.step(state, target_ids, num_candidates)
        parts = [Candidates(first.token_ids[None], first.logits[None], first.log_normalizer[None])]
        left = steps - 1
        while left and stop_id not in (best := parts[-1].token_ids[-1, :, 0]).tolist():
            began = time.perf_counter()
            part = self._session.ahead(state, best[:, None], num_candidates, min(left, STEPS_AHEAD), stop_id)
            taken = len(part.token_ids)
            self.step_s.extend([(time.perf_counter() - began) / taken] * taken)
            parts.append(part)
            left -= taken
        return Candidates(
            np.concatenate([part.token_ids for part in parts]),
            np.concatenate([part.logits for part in parts]),
            np.concatenate([part.log_normalizer for part in parts]),
        )
