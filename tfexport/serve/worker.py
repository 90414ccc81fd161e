"""The thread that owns the batches of one loaded model."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from tfexport.errors import EngineFailed, ServingError
from tfexport.runtime.session import Session
from tfexport.serve.config import ServingConfig
from tfexport.serve.generation import Event
from tfexport.serve.observer import Observer
from tfexport.serve.scheduler import Scheduler, WaitingQueue

logger = logging.getLogger(__name__)
# Seconds between two signs of life of an idle thread, at most.
IDLE_S = 0.5


class Worker:
    """Decodes what is put into its queue until the queue is closed.

    Attributes:
        waiting: the queue.
        failure: what has ended the thread early; None while all is well.
    """

    def __init__(
        self,
        session: Session,
        config: ServingConfig,
        observer: Observer,
        publish: Callable[[list[Event]], None],
        fail: Callable[[EngineFailed], None],
    ) -> None:
        """Start the thread.

        Args:
            session: any backend; it stays the caller's.
            config: slots, queue and budget.
            observer: told of each step, on the thread.
            publish: called on the thread with what a step has brought.
            fail: called on the thread when it has failed; nothing more comes of any job.
        """
        self.waiting = WaitingQueue(config.max_waiting, config.max_waiting_tokens)
        self.failure: BaseException | None = None
        self._scheduler = Scheduler(session, self.waiting, config, observer)
        self._publish, self._fail = publish, fail
        self._idle_s = min(IDLE_S, config.stall_s / 2)
        self._is_aborted = False
        self._alive_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="tfexport-engine", daemon=True)
        self._thread.start()

    @property
    def slots(self) -> int:
        """Rows that are decoded at once."""
        return self._scheduler.slots

    @property
    def num_rows(self) -> int:
        """Slots that are taken."""
        return self._scheduler.num_rows if self._thread.is_alive() else 0

    @property
    def silent_s(self) -> float:
        """Seconds since the thread gave a sign of life; 0 once it has ended."""
        return time.monotonic() - self._alive_at if self._thread.is_alive() else 0.0

    def abort(self, reason: ServingError) -> None:
        """Close the queue, and end before the next step; nothing more comes of any job."""
        self._is_aborted = True
        self.waiting.close(reason)

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the thread to end, which it does after the queue was closed; return whether it has."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _step(self) -> None:
        # Not in `_run`, whose variables would keep the last generations, and so their engine, alive.
        if events := self._scheduler.step():
            self._publish(events)

    def _run(self) -> None:
        try:
            while not self._is_aborted:
                self._alive_at = time.monotonic()
                if self._scheduler.is_busy:
                    self._step()
                elif self.waiting.is_closed:
                    return
                else:
                    self.waiting.wait(self._idle_s)
        except BaseException as error:  # whatever it is, those who wait get an error
            logger.exception("the engine's thread has failed")
            self.failure = error
            failed = EngineFailed(f"the engine has failed: {str(error) or type(error).__name__}; start it anew")
            self.waiting.close(failed)
            self._fail(failed)
