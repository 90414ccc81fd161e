"""Read and write directories whose manifest lists size and hash of every file."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self

from tfexport._io import atomic
from tfexport._io.signature import SIGNATURE_BYTES, SIGNATURE_SUFFIX
from tfexport.config import Config, Count, Sha256
from tfexport.errors import MAX_PROBLEMS, BundleError

MAX_MANIFEST_BYTES = 4 * 1024 * 1024
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class FileEntry(Config, subject="file"):
    """Size and sha256 (lower-case hex) of one file."""

    bytes: Count
    sha256: Sha256

    @classmethod
    def of(cls, path: Path) -> Self:
        """Hash a file and return its entry."""
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return cls(bytes=file.tell(), sha256=digest)


# ---- reading


def read_manifest(folder: Path, name: str) -> bytes:
    """Read a manifest, without following links."""
    try:
        status = os.lstat(folder / name)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise BundleError(f"{name} is missing") from error
    if problem := plain_problem(name, status):
        raise BundleError(problem)
    if status.st_size > MAX_MANIFEST_BYTES:
        raise BundleError(f"{name} has {status.st_size} bytes, the limit is {MAX_MANIFEST_BYTES}")
    return (folder / name).read_bytes()


def file_problems(
    folder: Path,
    files: Mapping[str, FileEntry],
    manifest: str,
    *,
    unread: Collection[str] = (),  # only their size is compared
    without: str | None = None,  # a subdirectory
) -> list[str]:
    """List files that are missing, changed, not in the manifest or not plain files."""
    signature = manifest + SIGNATURE_SUFFIX
    problems = []
    found = set()
    for name, status in sorted(walk(folder, without=without)):
        found.add(name)
        size = status.st_size
        if problem := plain_problem(name, status):
            problems.append(problem)
        elif name == signature and size != SIGNATURE_BYTES:
            problems.append(f"{name} has {size} bytes, expected {SIGNATURE_BYTES}")
        elif name not in files and name not in {manifest, signature}:
            problems.append(f"{name!r} is not in {manifest}")
        elif name in files and size != files[name].bytes:
            problems.append(f"{name} has {size} bytes, expected {files[name].bytes}")
        elif name in files and name not in unread:
            problems += changed_problems(folder, {name: files[name]})
    for name in sorted(set(files) - found):
        is_folder = (folder / name).is_dir()
        problems.append(f"{name} is a directory, expected a plain file" if is_folder else f"{name} is missing")
    return problems


def changed_problems(folder: Path, files: Mapping[str, FileEntry]) -> list[str]:
    """List the files whose hash differs from their entry."""
    return [
        f"{name} was changed (its sha256 differs)"
        for name, entry in files.items()
        if FileEntry.of(folder / name).sha256 != entry.sha256
    ]


def foreign_problems(folder: Path, own: Collection[str]) -> list[str]:
    """List everything in a directory except the plain files `own`."""
    return [
        plain_problem(name, status) or f"{name!r} does not belong to it"
        for name, status in sorted(walk(folder))
        if name not in own or plain_problem(name, status)
    ][:MAX_PROBLEMS]


def plain_problem(name: str, status: os.stat_result) -> str | None:
    """Return why this is not a plain file, or None if it is."""
    if stat.S_ISLNK(status.st_mode):
        return f"{name!r} is a symbolic link, expected a plain file"
    if not stat.S_ISREG(status.st_mode):
        return f"{name!r} is neither a file nor a directory, expected a plain file"
    if status.st_nlink != 1:
        return f"{name!r} is a hard link ({status.st_nlink} names), expected a file of its own"
    return None


def walk(folder: Path, *, without: str | None = None) -> Iterator[tuple[str, os.stat_result]]:
    """Yield name and status of every file and link that is not in `without`."""
    waiting = [""]
    while waiting:
        parent = waiting.pop()
        for entry in os.scandir(folder / parent):
            name = f"{parent}{entry.name}"
            status = os.lstat(entry.path)  # on Windows, `entry.stat` has no number of links
            if not stat.S_ISDIR(status.st_mode):
                yield name, status
            elif name != without:
                waiting.append(f"{name}/")


# ---- writing


@contextmanager
def written(
    target: Path, what: str, check: Callable[[Path], object], *, remedy: str = "choose another output"
) -> Iterator[Path]:
    """Yield an empty directory, which becomes `target`, called `what` in errors.

    `check` raises if a folder may not be replaced. It gets the target, and then the path to which it was moved.
    """
    with ExitStack() as stack:
        with write_errors(what, remedy=remedy):
            target.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(atomic.locked(target))
            atomic.recover(target)
            if os.path.lexists(target):
                check(target)
            draft = stack.enter_context(atomic.temporary(target))
        with write_errors(what, draft, remedy):
            yield draft
        with write_errors(what, remedy=remedy):
            atomic.publish(draft, target, check)


@contextmanager
def write_errors(what: str, within: Path | None = None, remedy: str = "choose another output") -> Iterator[None]:
    """Convert OSErrors of writing to BundleError; with `within` only those about it."""
    try:
        yield
    except OSError as error:
        concerns_us = within is None or error.filename is None or str(error.filename).startswith(str(within))
        if isinstance(error, BrokenPipeError) or (error.errno not in _NO_ROOM and not concerns_us):
            raise
        remedy = "free some space or choose another output" if error.errno in _NO_ROOM else remedy
        raise BundleError(f"cannot write {what}: {cause(error)}; {remedy}") from error


def cause(error: OSError) -> str:
    """Format the reason of an OSError and the file that it concerns."""
    reason = error.strerror or str(error)
    return reason if error.filename is None else f"{reason} ({error.filename})"
