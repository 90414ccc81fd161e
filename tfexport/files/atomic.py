"""An atomic directory: it appears under its final name whole or not at all.

For a target `NAME` there are up to three siblings, all gone after success:

- `.NAME.lock` is locked (flock) by the one process that writes NAME. The
  kernel drops the lock with the process, so whoever holds it knows that the
  other two siblings belong to the dead.
- `.NAME.tmp-…` is the directory being written.
- `.NAME.old-…` is the former NAME, from the rename that puts it aside until
  the new one is in place. It is put back when a kill came between the two.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tfexport.errors import BundleError


@contextmanager
def locked(target: Path) -> Iterator[None]:
    """Be the only writer of `target`; its parent must exist.

    Raises:
        BundleError: another process, or thread, is writing it.
        OSError: the lock file cannot be made.
    """
    path = target.with_name(f".{target.name}.lock")
    lock = _lock(path)
    try:
        yield
    finally:
        # Removed while still locked: who waits for this file sees that it lost its name.
        path.unlink(missing_ok=True)
        os.close(lock)


def _lock(path: Path) -> int:
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            if not isinstance(error, BlockingIOError):
                raise
            target = path.with_name(path.name[1 : -len(".lock")])
            raise BundleError(f"{target} is being written by another process; wait until it has ended") from error
        if _is_at(lock, path):
            return lock
        os.close(lock)  # the owner before us removed the file after we had opened it


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def recover(target: Path) -> None:
    """Clear up after a killed writer; call under the lock.

    Puts the former `target` back if it is missing and removes every other leftover.
    """
    former = _siblings(target, "old")
    if former and not os.path.lexists(target):
        former.pop().rename(target)
    for leftover in former + _siblings(target, "tmp"):
        shutil.rmtree(leftover)


def restore(target: Path) -> None:
    """Put a missing `target` back if a writer was killed while replacing it.

    Raises:
        BundleError: it is just being replaced.
        OSError: it cannot be put back.
    """
    if target.parent.is_dir() and not os.path.lexists(target) and _siblings(target, "old"):
        with locked(target):
            recover(target)


def aside(folder: Path) -> list[Path]:
    """List the targets in `folder` that are missing because a writer was killed while replacing them."""
    former = re.compile(r"\.(.+)\.old-[0-9a-f]{16}")
    names = {match[1] for path in folder.iterdir() if (match := former.fullmatch(path.name))}
    return [folder / name for name in sorted(names) if not os.path.lexists(folder / name)]


@contextmanager
def temporary(target: Path) -> Iterator[Path]:
    """Make an empty directory beside `target`, removed at the end unless published."""
    path = _sibling(target, "tmp")
    path.mkdir()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def publish(path: Path, target: Path) -> None:
    """Move the finished directory `path` to `target`, replacing a directory there.

    Everything is on the disk before a name changes; on an error the former
    `target` is back.
    """
    for folder, _, names in os.walk(path):
        for name in names:
            _sync(Path(folder, name))
        _sync(Path(folder))
    former = _sibling(target, "old") if os.path.lexists(target) else None
    if former:
        target.rename(former)
    try:
        path.rename(target)
    except BaseException:
        if former:
            former.rename(target)
        raise
    _sync(target.parent)
    if former:
        # What cannot be removed now is removed by the next writer.
        shutil.rmtree(former, ignore_errors=True)


def _sibling(target: Path, role: str) -> Path:
    return target.with_name(f".{target.name}.{role}-{secrets.token_hex(8)}")


def _siblings(target: Path, role: str) -> list[Path]:
    name = re.compile(rf"\.{re.escape(target.name)}\.{role}-[0-9a-f]{{16}}")
    return sorted(path for path in target.parent.iterdir() if name.fullmatch(path.name))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
