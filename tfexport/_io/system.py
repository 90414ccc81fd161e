"""Hide how operating systems differ in locks, links and writing to the disk."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import BinaryIO

if sys.platform == "win32":
    import msvcrt

    NO_FOLLOW = 0

    def lock(descriptor: int, *, waits: bool) -> None:
        """Lock an open file until it is closed; wait or raise BlockingIOError."""
        while True:
            try:
                return msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
            except PermissionError as error:
                if not waits:
                    raise BlockingIOError(*error.args) from error
            time.sleep(0.1)

    def remove_locked(path: Path, descriptor: int) -> None:
        """Close and remove a locked file; PermissionError if another process opens it."""
        os.close(descriptor)
        path.unlink()

    def sync(path: Path) -> None:
        """Write a file to the disk; for directories, Windows has no such call."""
        if path.is_file():
            _flush(path, os.O_RDWR)

    def open_plain(path: Path) -> BinaryIO:
        """Open a file for reading; OSError if it is a link."""
        if path.is_symlink():
            raise OSError(f"{path} is a symbolic link")
        return path.open("rb")

    @contextmanager
    def opened_folder(path: Path) -> Iterator[Callable[[str], BinaryIO]]:
        """Yield `open_plain` for the names in a folder, which may be replaced meanwhile."""
        yield lambda name: open_plain(path / name)
else:
    import fcntl

    NO_FOLLOW = os.O_NOFOLLOW

    def lock(descriptor: int, *, waits: bool) -> None:
        """Lock an open file until it is closed; wait or raise BlockingIOError."""
        fcntl.flock(descriptor, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)

    def remove_locked(path: Path, descriptor: int) -> None:
        """Close and remove a locked file; a process that opened it sees that it is gone."""
        try:
            path.unlink()
        finally:
            os.close(descriptor)

    def sync(path: Path) -> None:
        """Write a file or directory to the disk."""
        _flush(path, os.O_RDONLY)

    def open_plain(path: Path | str, folder: int | None = None) -> BinaryIO:
        """Open a file for reading; OSError if it is a link. Do not wait for a pipe."""
        opener = partial(os.open, dir_fd=folder)
        return open(path, "rb", opener=lambda name, flags: opener(name, flags | NO_FOLLOW | os.O_NONBLOCK))

    @contextmanager
    def opened_folder(path: Path) -> Iterator[Callable[[str], BinaryIO]]:
        """Yield `open_plain` for the names in a folder, also while it is replaced."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | NO_FOLLOW)
        try:
            yield lambda name: open_plain(name, descriptor)
        finally:
            os.close(descriptor)


def _flush(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
