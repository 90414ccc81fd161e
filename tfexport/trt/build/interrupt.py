"""Ctrl-C while a library calls back into Python: there it would be printed and lost."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def interruptible() -> Iterator[Callable[[], None]]:
    """Hold Ctrl-C back within the block, and raise it where it can be taken.

    Yields:
        A function that raises KeyboardInterrupt once Ctrl-C was pressed; the end of the block does so too.
        Outside of the main thread, which alone gets signals, it does nothing.
    """
    pressed = threading.Event()

    def check() -> None:
        if pressed.is_set():
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield check
        return
    former = signal.signal(signal.SIGINT, lambda _signal, _frame: pressed.set())
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, former)
    check()
