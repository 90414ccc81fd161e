"""What a model aligns beside its running batches: one thing after the other, on a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from tfexport.errors import QueueFull, ServingError

Found = TypeVar("Found")
# Pairs that wait at most for the one that is read; each is a pass through the model beside the running batches.
MAX_WAITING = 8


class Alignments:
    """Computes what is submitted, in order, so that alignments take no more than one thread from the batches.

    It belongs to an event loop; only what it computes runs elsewhere.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin with nothing to do; the thread begins with the first thing."""
        self._loop, self._executor = loop, ThreadPoolExecutor(1, "tfexport-align")
        self._open: set[asyncio.Future[Any]] = set()

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits or is computed."""
        return not self._open

    def check_room(self, most: int) -> None:
        """Refuse one more where more than `most` wait for the one that is computed.

        Raises:
            QueueFull: they do.
        """
        if len(self._open) > most:
            raise QueueFull(f"{most} alignments wait, which is the limit; come again later")

    def submit(self, compute: Callable[[], Found]) -> asyncio.Future[Found]:
        """Compute something when it is its turn; not if the future is cancelled before that."""
        found: asyncio.Future[Found] = self._loop.create_future()
        self._open.add(found)
        found.add_done_callback(self._open.discard)
        self._executor.submit(self._compute, compute, found)
        return found

    async def join(self, end: float, hang_s: float) -> bool:
        """Wait for all that was submitted; say whether it was computed.

        Args:
            end: when to stop waiting, by `time.monotonic`; inf for never.
            hang_s: seconds after which something that is still computed is given up.
        """
        while self._open:
            wait_s = max(0.0, min(end - time.monotonic(), hang_s))
            done, _ = await asyncio.wait(tuple(self._open), timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                return False
        return True

    def close(self, reason: ServingError) -> None:
        """End the thread after what it computes now; whoever waits for anything gets the reason."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        for found in tuple(self._open):
            if not found.done():
                found.set_exception(copy.copy(reason))

    def _compute(self, compute: Callable[[], Found], found: asyncio.Future[Found]) -> None:
        """Compute on the thread."""
        if found.done():  # nobody waits any more
            return
        try:
            settle = partial(found.set_result, compute())
        except Exception as error:  # noqa: BLE001 - whoever waits for it hears of it
            settle = partial(found.set_exception, error)
        with contextlib.suppress(RuntimeError):  # nobody listens once the event loop is closed
            self._loop.call_soon_threadsafe(_settle, found, settle)


def _settle(found: asyncio.Future[Any], settle: Callable[[], None]) -> None:
    if not found.done():
        settle()
