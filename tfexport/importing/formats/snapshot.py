"""Snapshots: the bytes of a file, read once into memory that nobody else can change, with their sha256.

A file that is mapped stays in the hands of others: when one of them cuts it
short, the next look at a weight ends the process, and a sum that was taken
before says nothing of what is read later. So a file is copied first, and what
is checked, summed up and used are the bytes of the copy.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from tfexport.errors import CheckpointError

_CHUNK = 8 * 1024 * 1024


@dataclass(frozen=True)
class FileSum:
    """Size and sha256 (lower-case hex) of what was read of a file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Snapshot:
    """A private copy: `path` opens it, `sum` has its size and sha256."""

    path: Path
    sum: FileSum


@contextmanager
def snapshot(path: Path) -> Iterator[Snapshot]:
    """Copy a file into memory, as large as the file is.

    Args:
        path: of a plain file.

    Yields:
        The copy. Its path is good inside of the block; what was mapped from it, for as long as somebody holds it.

    Raises:
        CheckpointError: it is larger than the memory of this machine, or was changed while it was read.
        OSError: it cannot be read, or there is no room for it.
    """
    with path.open("rb", buffering=0) as file, _private_file() as copy:
        before = os.fstat(file.fileno())
        _check_room(path, before.st_size)
        digest = hashlib.sha256()
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            copy.write(chunk)
        copy.flush()
        size, after = copy.tell(), os.fstat(file.fileno())
        if (before.st_size, before.st_mtime_ns) != (size, after.st_mtime_ns):
            raise CheckpointError(f"{path}: was changed while it was read; give it again when it is whole")
        yield Snapshot(_path_of(copy), FileSum(size, digest.hexdigest()))


def _check_room(path: Path, size: int) -> None:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if size > memory:
        raise CheckpointError(
            f"{path}: has {size} bytes, which this machine's memory of {memory} bytes cannot hold; use a larger one"
        )


def _private_file() -> BinaryIO:
    """Make a file without a name: in memory, or where the system has no such files, on the disk for temporary ones."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("checkpoint"), "w+b")
    return tempfile.TemporaryFile()


def _path_of(file: BinaryIO) -> Path:
    folder = Path("/proc/self/fd")
    return (folder if folder.exists() else Path("/dev/fd")) / str(file.fileno())
