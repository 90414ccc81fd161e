"""Encode the sources of new requests on a thread of their own."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from queue import SimpleQueue
from typing import cast

from tfexport.decode.request import Request
from tfexport.runtime.cpu import available_cores
from tfexport.runtime.session import EncodesAhead, Session
from tfexport.runtime.sources import Sources, pad_sources

# Threads of all engines of the process that compute. Engines with few requests must not wait for the second thread of
# one with many.
COMPUTING: set[object] = set()


class Encoder:
    """Encode sources on a thread while the engine's thread takes decoder steps.

    One thread uses it. The second thread starts with the first sources.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.is_usable = isinstance(session, EncodesAhead) and session.can_encode_ahead
        self._cores = available_cores()
        self.requests: Sequence[Request] = ()  # those that `begin` was given, until `take` returns them
        self._expected_end = 0.0
        self._given: SimpleQueue[Sources | None] = SimpleQueue()
        self._encoded: SimpleQueue[tuple[Sources, float] | BaseException] = SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def has_core(self) -> bool:
        """Whether a core is left for the second thread."""
        return self.is_usable and len(COMPUTING) < self._cores

    @property
    def is_done(self) -> bool:
        """Whether `take` returns without waiting."""
        return not self._encoded.empty()

    @property
    def left_s(self) -> float:
        """Estimated time until the sources are encoded."""
        return self._expected_end - time.monotonic()

    def begin(self, requests: Sequence[Request], expected_s: float) -> None:
        """Encode the sources of requests."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="tfexport-encoder", daemon=True)
            self._thread.start()
        COMPUTING.add(self)
        self.requests, self._expected_end = requests, time.monotonic() + expected_s
        self._given.put(pad_sources(self._session.spec.source, [request.source for request in requests]))

    def take(self) -> tuple[Sequence[Request], Sources, float]:
        """Wait for the sources; return requests, sources and the seconds of encoding."""
        encoded, requests, self.requests = self._encoded.get(), self.requests, ()
        COMPUTING.discard(self)
        if isinstance(encoded, BaseException):
            raise encoded
        return requests, *encoded

    def close(self) -> None:
        """End the thread after its current sources."""
        COMPUTING.discard(self)
        if self._thread:
            self._given.put(None)
            self._thread.join()

    def _run(self) -> None:
        # Local variables of this function would keep the last sources in memory.
        while self._encode(self._given.get()):
            pass

    def _encode(self, sources: Sources | None) -> bool:
        if sources is None:
            return False
        start = time.monotonic()
        try:
            encoded = cast(EncodesAhead, self._session).encode_ahead(sources)
        except BaseException as error:  # noqa: BLE001 - `take` raises it
            self._encoded.put(error)
        else:
            self._encoded.put((encoded, time.monotonic() - start))
        return True
