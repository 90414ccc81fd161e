"""Decode the requests of one loaded model on a thread."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from tfexport.errors import EngineFailed, ServingError
from tfexport.runtime.session import Session
from tfexport.serve._generation import Event
from tfexport.serve._scheduler import Scheduler, WaitingQueue
from tfexport.serve.config import ServingConfig
from tfexport.serve.observer import Observer

logger = logging.getLogger(__name__)
# An idle thread reports that it is alive at least this often.
IDLE_S = 0.5


class Worker:
    """Decode queued requests on a thread until the queue is closed.

    Attributes:
        failure: the exception that ended the thread; None if it has not failed.
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

        The thread calls `publish`, `fail` and `observer`. The caller closes `session`.
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
        """Maximum number of rows that are decoded at once."""
        return self._scheduler.slots

    @property
    def num_rows(self) -> int:
        """Number of slots in use."""
        return self._scheduler.num_rows if self._thread.is_alive() else 0

    @property
    def silent_s(self) -> float:
        """Seconds since the thread last made progress; 0 after it ended."""
        return time.monotonic() - self._alive_at if self._thread.is_alive() else 0.0

    def abort(self, reason: ServingError) -> None:
        """Close the queue and stop before the next step, without further events."""
        self._is_aborted = True
        self.waiting.close(reason)

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the thread to end; return whether it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _step(self) -> None:
        # A separate method, because local variables of `_run` would keep the last generations and their engine alive.
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
        except BaseException as error:  # callers must receive an error in any case
            logger.exception("the engine's thread has failed")
            self.failure = error
            failed = EngineFailed(f"the engine has failed: {str(error) or type(error).__name__}; start it anew")
            self.waiting.close(failed)
            self._fail(failed)
