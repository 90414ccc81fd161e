"""Files of this machine, or of a file system that is mounted on it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from os import PathLike
from pathlib import Path
from typing import BinaryIO

from tfexport._io.atomic import locked
from tfexport._io.paths import checked_path
from tfexport._io.strict_json import plain_problem
from tfexport.bulk.places.place import PARTS, writing
from tfexport.errors import InputError

# What is being written begins with this; what is whole does not.
_DRAFT = ".tmp-"


class LocalFolder:
    """The folder of parts beside a file of this machine; see `Folder`."""

    def __init__(self, target: Path) -> None:
        """Name it after the file; nothing is made."""
        self._target, self._path = target, target.with_name(target.name + PARTS)
        self.name = str(self._path)

    def names(self) -> frozenset[str]:
        """List the files that are whole; none where there is no folder."""
        return frozenset(name for name in self._entries() if not name.startswith(_DRAFT))

    def read(self, name: str) -> bytes:
        """Return the bytes of a file."""
        return (self._path / name).read_bytes()

    def make(self) -> None:
        """Make the folder where it is missing."""
        self._path.mkdir(exist_ok=True)

    def write(self, name: str, data: bytes) -> None:
        """Write a file whole or not at all; the folder is there."""
        with self._draft() as draft:
            draft.write_bytes(data)
            _sync(draft)
            draft.replace(self._path / name)

    def clear(self) -> None:
        """Remove what killed writers have left half done."""
        for name in self._entries():
            if name.startswith(_DRAFT):
                (self._path / name).unlink()

    @contextmanager
    def publish(self) -> Iterator[BinaryIO]:
        """Yield a stream; what is written to it lies in the folder's place, whole, when the block ends well."""
        with self._draft() as draft:
            with draft.open("wb") as stream:
                yield stream
            _sync(draft)
            draft.replace(self._target)
            _sync(self._target.parent)

    def remove(self, first: str) -> None:
        """Remove the folder with all that was written to it, the file `first` before the others."""
        (self._path / first).unlink()
        for name in self._entries():
            (self._path / name).unlink()
        self._path.rmdir()

    def _entries(self) -> list[str]:
        with suppress(FileNotFoundError):
            return os.listdir(self._path)  # noqa: PTH208 - names are all that is wanted
        return []

    @contextmanager
    def _draft(self) -> Iterator[Path]:
        """Yield a path to write to, removed at the end unless it was moved."""
        draft = self._path / f"{_DRAFT}{secrets.token_hex(8)}"
        try:
            yield draft
        finally:
            with suppress(OSError):
                draft.unlink(missing_ok=True)


class LocalPlace:
    """The place of a file of this machine; see `Place`."""

    def __init__(self, path: str | PathLike[str]) -> None:
        """Name it; a link is followed."""
        given = checked_path(path, "path")
        self.name, self.path = str(given), Path(os.path.realpath(given))
        self.parts = LocalFolder(self.path)

    def open(self) -> BinaryIO:
        """Open the file to read, anywhere in it."""
        if problem := plain_problem(self.path):
            raise InputError(f"{self.name}: {problem}; check the path")
        return self.path.open("rb")

    def stamp(self) -> tuple[int, int]:
        """Return size in bytes and time of the last change, in nanoseconds."""
        found = self.path.stat()
        return found.st_size, found.st_mtime_ns

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Be the only run that writes the file."""
        with ExitStack() as stack:
            with writing(self.name):
                if self.path.is_dir():
                    raise InputError(f"{self.name}: is a directory, expected the name of a file; choose another place")
                stack.enter_context(locked(self.path))
            yield


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
