"""What a shell gives a process and takes from it: streams that may be closed, and signals."""

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
    """SIGTERM has come."""


def check_streams() -> None:
    """Put /dev/null in the place of standard streams that are closed, before a file gets their number.

    Whatever a library wrote to such a stream would go into that file.

    Raises:
        ClickException: standard output is closed, so what is printed would be lost.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stderr is None:  # as Python has it where the stream is closed
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115 - for as long as the process runs
    if sys.stdout is None:
        raise click.ClickException("standard output is closed; redirect it, for example to /dev/null")


@contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM end what runs as Ctrl-C does, so that it clears up; a handler that there is already stays.

    Raises:
        Terminated: in the main thread, when SIGTERM comes.
    """
    is_ours = threading.current_thread() is threading.main_thread()
    if not is_ours or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def terminate(number: int, _frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)  # once is enough: clearing up is not to be cut short
        raise Terminated(EXIT_TERMINATED)

    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def says_whether_written(output: Path) -> Iterator[None]:
    """Add to Ctrl-C and SIGTERM a note on whether the directory `output` was written before they came."""
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
    """Return names and inodes of what lies in a folder, but for what is hidden; nothing where it cannot be read."""
    try:
        return frozenset((entry.name, entry.inode()) for entry in os.scandir(folder) if not entry.name.startswith("."))
    except OSError:
        return frozenset()
