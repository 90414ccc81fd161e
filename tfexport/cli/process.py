"""Handle closed standard streams and signals."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

EXIT_TERMINATED = 128 + signal.SIGTERM


class Terminated(SystemExit):
    """Raised in the main thread on SIGTERM."""


def check_streams() -> None:
    """Replace closed standard streams by /dev/null, before a file gets their number.

    Whatever a library wrote to such a stream would go into that file.

    Raises:
        ClickException: standard output is closed, so results would be lost.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stderr is None:  # Python's value for a closed stream
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115 - for as long as the process runs
    if sys.stdout is None:
        raise click.ClickException("standard output is closed; redirect it, for example to /dev/null")


@contextmanager
def terminable() -> Iterator[None]:
    """Raise `Terminated` on SIGTERM, unless SIGTERM has a handler already."""
    is_ours = threading.current_thread() is threading.main_thread()
    if not is_ours or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def terminate(number: int, _frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)  # do not interrupt the cleanup
        raise Terminated(EXIT_TERMINATED)

    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def says_whether_written(output: Path) -> Iterator[None]:
    """On Ctrl-C and SIGTERM, note whether the directory `output` was written."""
    before = _content(output)
    try:
        yield
    except (KeyboardInterrupt, Terminated) as stop:
        after = _content(output)
        if after != before:
            stop.add_note(f"{output} is written and whole")
        else:
            stop.add_note(f"{output} is {'as it was' if before else 'not written'}")
        raise


def _content(folder: Path) -> frozenset[tuple[str, int]]:
    """Return names and inodes of a folder's visible entries."""
    try:
        return frozenset((entry.name, entry.inode()) for entry in os.scandir(folder) if not entry.name.startswith("."))
    except OSError:
        return frozenset()
