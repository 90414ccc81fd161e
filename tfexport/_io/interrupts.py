"""Delay Ctrl-C and SIGTERM in code that must not be interrupted."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def interrupts_held() -> Iterator[Callable[[], None]]:
    """Delay Ctrl-C and SIGTERM until the block ends.

    Outside of the main thread, which receives the signals, this does nothing.

    Yields:
        A function that handles a signal that has arrived.
    """
    pressed: list[int] = []
    former: dict[int, Callable[[int, FrameType | None], Any]] = {}

    def check() -> None:
        if pressed:
            number = pressed[0]
            pressed.clear()
            former[number](number, None)

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            handler = signal.getsignal(number)
            if callable(handler):
                former[number] = handler
                signal.signal(number, lambda came, _frame: pressed.append(came))
    try:
        yield check
    finally:
        for held, handler in former.items():
            signal.signal(held, handler)
    check()
