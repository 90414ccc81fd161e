"""A call that another thread may cancel."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

from tfexport.decode.loop import Loop, Update
from tfexport.errors import Cancelled

# How long the steps that are taken at once may take where a call can be cancelled: so much later it is seen.
SEEN_WITHIN_S = 0.02


def check_cancelled(cancel: threading.Event | None) -> None:
    """Give a call up whose event is set.

    Raises:
        Cancelled: it is.
    """
    if cancel is not None and cancel.is_set():
        raise Cancelled("the call was cancelled: its event is set; clear it to call again")


def updates(loop: Loop, cancel: threading.Event | None) -> Iterator[list[Update]]:
    """Step a loop until nothing is left; where it can be cancelled, few steps at once.

    Args:
        loop: whose requests were submitted.
        cancel: looked at before each step; None for a call that nobody cancels.

    Raises:
        Cancelled: the event is set.
        BackendError: the backend failed.
    """
    most = None if cancel is None else 1
    while loop.is_busy:
        check_cancelled(cancel)
        began, taken = time.perf_counter(), loop.num_steps
        found = loop.step(most)
        took, taken = time.perf_counter() - began, loop.num_steps - taken
        if cancel is not None and taken:
            most = max(1, int(taken * SEEN_WITHIN_S / took))
        yield found
