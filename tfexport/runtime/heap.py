"""Memory that was freed goes back to the system."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache


def trim_heap() -> None:
    """Have glibc give back the pages that it keeps after they were freed; elsewhere nothing.

    It keeps an arena for about each thread and gives back the end of one alone. Models are loaded and freed by threads
    that change, what one has freed does not serve the next, and a process that loads again and again would grow.
    """
    _malloc_trim()(0)


@cache
def _malloc_trim() -> Callable[[int], object]:
    """Find it once: each time leaves garbage behind."""
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    return getattr(library, "malloc_trim", lambda pad: None)
