"""Write a file or directory that appears complete or not at all.

For a target `NAME` there are up to three siblings, which are removed after success:

- `.NAME.lock` is locked by the process that writes NAME. The system releases the lock when the process ends, so the
  lock's owner knows that the other two siblings belong to killed processes.
- `.NAME.tmp-…` is being written, or being deleted.
- `.NAME.old-…` is the former NAME, complete, until the new one is in place. If a writer is killed before that, the next
  writer renames it back.

If a sibling's name would be too long for the file system, it contains the sha256 of NAME instead.
"""

from __future__ import annotations

import hashlib
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from tfexport._io.system import NO_FOLLOW, lock, remove_locked, sync
from tfexport.errors import BundleError

# Linux and macOS limit a name to 255 bytes; a sibling's name is longer than its target's.
_LONGEST = 255 - len("..tmp-0123456789abcdef")
_FORMER = re.compile(r"\.(.+)\.old-[0-9a-f]{16}")
_LEFTOVER = re.compile(r"\.(.+)\.(?:lock|(?:tmp|old)-[0-9a-f]{16})")


@contextmanager
def interrupts_held() -> Iterator[Callable[[], None]]:
    """Delay Ctrl-C and SIGTERM; yield a function that handles one that has arrived."""
    arrived: list[int] = []
    former: dict[int, Callable[[int, FrameType | None], Any]] = {}

    def check() -> None:
        if arrived:
            number = arrived[0]
            arrived.clear()
            former[number](number, None)

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            handler = signal.getsignal(number)
            if callable(handler):
                former[number] = handler
                signal.signal(number, lambda number, _frame: arrived.append(number))
    try:
        yield check
    finally:
        for held, handler in former.items():
            signal.signal(held, handler)
    check()


@contextmanager
def locked(target: Path, *, waits: bool = False) -> Iterator[None]:
    """Lock `target`, whose parent must exist.

    If it is being written, wait or raise BundleError.
    """
    path = target.with_name(f".{_stem(target)}.lock")
    held = None
    try:
        with suppress(FileNotFoundError):
            target.lstat()  # raises for an invalid name before any work is done
        with interrupts_held():
            held = _locked_file(path, target, waits)
        yield
    finally:
        if held is not None:
            # If this fails, the next writer takes the file over.
            with interrupts_held(), suppress(OSError):
                remove_locked(path, held)


def _locked_file(path: Path, target: Path, waits: bool) -> int:
    while True:
        opened = os.open(path, os.O_RDWR | os.O_CREAT | NO_FOLLOW, 0o666)
        try:
            lock(opened, waits=waits)
            with suppress(FileNotFoundError):  # the previous owner removed the file after we had opened it
                if os.path.samestat(os.fstat(opened), path.stat()):
                    return opened
        except BlockingIOError as error:
            os.close(opened)
            raise BundleError(f"{target} is being written by another process; wait until it has ended") from error
        except OSError:
            os.close(opened)
            raise
        os.close(opened)


def recover(target: Path) -> None:
    """Clean up after a killed writer; restore `target`, which is locked, if missing."""
    former = _siblings(target, "old")
    if former and not os.path.lexists(target):
        former.pop().rename(target)
    for leftover in former + _siblings(target, "tmp"):
        if leftover.is_dir():
            _remove(leftover)
        else:
            leftover.unlink()


def restore(target: Path) -> None:
    """Restore a missing `target` if a killed writer was replacing it."""
    if target.parent.is_dir() and not os.path.lexists(target) and _siblings(target, "old"):
        with locked(target):
            recover(target)


def aside(folder: Path) -> list[Path]:
    """List the targets in `folder` that a killed writer has left missing."""
    names = {match[1] for path in folder.iterdir() if (match := _FORMER.fullmatch(path.name))}
    return [folder / name for name in sorted(names) if not os.path.lexists(folder / name)]


def is_leftover(name: str) -> bool:
    """Return whether this is the name of a writer's lock, temporary or former file."""
    return _LEFTOVER.fullmatch(name) is not None


def recover_all(folder: Path) -> None:
    """Clean up after every killed writer in `folder`; BundleError if one is running."""
    names = {match[1] for path in folder.iterdir() if (match := _LEFTOVER.fullmatch(path.name))}
    for name in sorted(names):
        with locked(folder / name):
            recover(folder / name)


@contextmanager
def temporary(target: Path) -> Iterator[Path]:
    """Create an empty directory next to `target`; removed at the end unless published."""
    path = _sibling(target, "tmp")
    try:
        path.mkdir()
        yield path
    finally:
        with interrupts_held():
            _remove(path, ignore_errors=True)


def publish(path: Path, target: Path, check: Callable[[Path], object]) -> None:
    """Flush a finished `temporary` directory and move it to `target`, which is locked.

    `check` gets the path to which the former `target` was renamed, and raises if it must not be deleted. After an error
    the former `target` is back.
    """
    for folder, _, names in os.walk(path):
        for name in names:
            sync(Path(folder, name))
        sync(Path(folder))
    with interrupts_held(), ExitStack() as undo:
        former = None
        if os.path.lexists(target):
            former = target.rename(_sibling(target, "old"))
            undo.callback(former.rename, target)
            check(former)
        path.rename(target)
        undo.callback(target.rename, path)
        sync(target.parent)
        undo.pop_all()
        if former:
            with suppress(OSError):  # the next writer deletes it
                # Renamed first, because a directory named "old" must always be complete.
                _remove(former.rename(_sibling(target, "tmp")))


def _remove(folder: Path, *, ignore_errors: bool = False) -> None:
    import shutil  # slow, because it imports compression modules; readers do not need it

    shutil.rmtree(folder, ignore_errors=ignore_errors)


@contextmanager
def whole_file(target: Path, *, waits: bool = False) -> Iterator[Path]:
    """Yield an empty file, which becomes `target` at the end if there is no error.

    `waits` is that of `locked`.
    """
    with locked(target, waits=waits):
        recover(target)
        draft = _sibling(target, "tmp")
        try:
            draft.touch()
            yield draft
            sync(draft)
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
