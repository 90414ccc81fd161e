"""An atomic directory, or file: it appears under its final name whole or not at all.

For a target `NAME` there are up to three siblings, all gone after success:

- `.NAME.lock` is locked (flock) by the one process that writes NAME. The
  kernel drops the lock with the process, so whoever holds it knows that the
  other two siblings belong to the dead.
- `.NAME.tmp-…` is being written, or being deleted.
- `.NAME.old-…` is the former NAME, whole, from the rename that puts it aside
  until the new one is in place. It is put back when a kill came between the two.

Where NAME is so long that a sibling's would be too long for a file system, its sha256 stands for it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tfexport._io.interrupts import interrupts_held
from tfexport.errors import BundleError

# Bytes of the longest name that Linux and macOS take, less what a sibling's name has more than its target's.
_LONGEST = 255 - len("..tmp-0123456789abcdef")
_LEFTOVER = re.compile(r"\.(.+)\.(?:lock|(?:tmp|old)-[0-9a-f]{16})")


@contextmanager
def locked(target: Path) -> Iterator[None]:
    """Be the only writer of `target`; its parent must exist.

    Raises:
        BundleError: another process, or thread, is writing it.
        OSError: the lock file cannot be made.
    """
    path = target.with_name(f".{_stem(target)}.lock")
    lock = None
    try:
        with suppress(FileNotFoundError):
            target.lstat()  # a name that cannot be is found out before the work
        with interrupts_held():
            lock = _lock(path, target)
        yield
    finally:
        if lock is not None:
            # Removed while still locked: who waits for this file sees that it lost its name. One that cannot be
            # removed now is taken over, and removed, by the next writer.
            with interrupts_held(), suppress(OSError):
                try:
                    path.unlink()
                finally:
                    os.close(lock)


def _lock(path: Path, target: Path) -> int:
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(lock, path):
                return lock
        except BlockingIOError as error:
            os.close(lock)
            raise BundleError(f"{target} is being written by another process; wait until it has ended") from error
        except OSError:
            os.close(lock)
            raise
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
        if leftover.is_dir():
            _remove(leftover)
        else:
            leftover.unlink()


def restore(target: Path) -> None:
    """Put a missing `target` back if a writer was killed while replacing it; raises BundleError if one lives."""
    if target.parent.is_dir() and not os.path.lexists(target) and _siblings(target, "old"):
        with locked(target):
            recover(target)


def aside(folder: Path) -> list[Path]:
    """List the targets in `folder` that are missing because a writer was killed while replacing them."""
    former = re.compile(r"\.(.+)\.old-[0-9a-f]{16}")
    names = {match[1] for path in folder.iterdir() if (match := former.fullmatch(path.name))}
    return [folder / name for name in sorted(names) if not os.path.lexists(folder / name)]


def is_leftover(name: str) -> bool:
    """Return whether this is the name of a sibling that a writer, living or killed, has made."""
    return _LEFTOVER.fullmatch(name) is not None


def recover_all(folder: Path) -> None:
    """Clear up after every killed writer of something in `folder`; raises BundleError if one is still writing."""
    names = {match[1] for path in folder.iterdir() if (match := _LEFTOVER.fullmatch(path.name))}
    for name in sorted(names):
        with locked(folder / name):
            recover(folder / name)


@contextmanager
def temporary(target: Path) -> Iterator[Path]:
    """Make an empty directory next to `target`, removed at the end unless published."""
    path = _sibling(target, "tmp")
    try:
        path.mkdir()
        yield path
    finally:
        with interrupts_held():
            _remove(path, ignore_errors=True)


def publish(path: Path, target: Path, check: Callable[[Path], object]) -> None:
    """Move the finished directory `path` to `target`, replacing a directory there.

    Everything is on the disk before a name changes; after an error the former `target` is back. Ctrl-C waits.

    Args:
        path: from `temporary`.
        target: under its lock.
        check: called with the former `target` when it can no longer be reached by its name; raises if it may not be
            deleted.
    """
    for folder, _, names in os.walk(path):
        for name in names:
            _sync(Path(folder, name))
        _sync(Path(folder))
    with interrupts_held():
        former = _sibling(target, "old") if os.path.lexists(target) else None
        _swap(path, target, former, check)
        if former:
            _discard(former, target)


def _swap(path: Path, target: Path, former: Path | None, check: Callable[[Path], object]) -> None:
    if former:
        target.rename(former)
    is_moved = False
    try:
        if former:
            check(former)
        path.rename(target)
        is_moved = True
        _sync(target.parent)
    except BaseException:
        if is_moved:
            target.rename(path)
        if former:
            former.rename(target)
        raise


def _remove(folder: Path, *, ignore_errors: bool = False) -> None:
    import shutil  # and with it three ways to compress, which whoever only reads a bundle does not wait for

    shutil.rmtree(folder, ignore_errors=ignore_errors)


def _discard(former: Path, target: Path) -> None:
    """Delete what was replaced; what cannot be deleted now is deleted by the next writer."""
    with suppress(OSError):
        # Under another name first: what is called "old" is whole, whenever a kill comes.
        _remove(former.rename(_sibling(target, "tmp")))


@contextmanager
def whole_file(target: Path) -> Iterator[Path]:
    """Write a file that appears as `target` when the block ends, complete or not at all.

    Yields:
        An empty file next to it to write to, on the same disk.

    Raises:
        BundleError: another process, or thread, is writing it.
        OSError: it cannot be written.
    """
    with locked(target):
        recover(target)
        draft = _sibling(target, "tmp")
        try:
            draft.touch()
            yield draft
            _sync(draft)
            draft.replace(target)
        finally:
            with interrupts_held(), suppress(OSError):
                draft.unlink(missing_ok=True)


def _stem(target: Path) -> str:
    raw = os.fsencode(target.name)
    return target.name if len(raw) <= _LONGEST else hashlib.sha256(raw).hexdigest()


def _sibling(target: Path, role: str) -> Path:
    return target.with_name(f".{_stem(target)}.{role}-{os.urandom(8).hex()}")


def _siblings(target: Path, role: str) -> list[Path]:
    name = re.compile(rf"\.{re.escape(_stem(target))}\.{role}-[0-9a-f]{{16}}")
    return sorted(path for path in target.parent.iterdir() if name.fullmatch(path.name))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
