"""Files on what `pyarrow.fs.FileSystem.from_uri` finds: S3, Google Cloud Storage, Azure, HDFS and others.

Source: https://arrow.apache.org/docs/python/filesystems.html
"""

from __future__ import annotations

import contextlib
import io
import secrets
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import BinaryIO, cast

import pyarrow
from pyarrow import fs

from tfexport.bulk.places.local import LocalPlace
from tfexport.bulk.places.place import PARTS, Place
from tfexport.errors import InputError, first_line

_DRAFT = ".tmp-"
# S3 copies no larger object in one request, and a move on S3 is a copy.
_MAX_S3_COPY = 5 * 2**30


def find_remote(uri: str) -> Place:
    """Return the place that a URI names; file:///… is one of this machine.

    Raises:
        InputError: pyarrow knows no such file system, or cannot reach it.
    """
    try:
        system, path = fs.FileSystem.from_uri(uri)
    except (OSError, ValueError) as error:  # ArrowInvalid is one; the URI is not repeated, it may hold a key
        scheme = uri.partition("://")[0]
        raise InputError(f"{scheme}://…: no such place ({first_line(error)}); check the URI") from error
    return LocalPlace(path) if isinstance(system, fs.LocalFileSystem) else RemotePlace(system, path)


class RemoteFolder:
    """The folder of parts beside a file; see `Folder`. An object of a store appears whole or not at all."""

    def __init__(self, system: fs.FileSystem, target: str) -> None:
        """Name it after the file; nothing is made."""
        self._system, self._target, self._path = system, target, target + PARTS
        self.name = f"{system.type_name}://{self._path}"

    def names(self) -> frozenset[str]:
        """List the files that are whole; none where there is no folder."""
        return frozenset(name for name in self._entries() if not name.startswith(_DRAFT))

    def read(self, name: str) -> bytes:
        """Return the bytes of a file."""
        with self._system.open_input_stream(f"{self._path}/{name}") as stream:
            return cast(bytes, stream.read())

    def make(self) -> None:
        """Make the folder where it is missing."""
        self._system.create_dir(self._path, recursive=True)

    def write(self, name: str, data: bytes) -> None:
        """Write a file whole or not at all; the folder is there."""
        with self._draft() as draft:
            with self._system.open_output_stream(draft) as stream:
                stream.write(data)
            self._system.move(draft, f"{self._path}/{name}")

    def clear(self) -> None:
        """Remove what killed writers have left half done."""
        for name in self._entries():
            if name.startswith(_DRAFT):
                self._system.delete_file(f"{self._path}/{name}")

    @contextmanager
    def publish(self) -> Iterator[BinaryIO]:
        """Yield a stream; what is written to it lies in the folder's place, whole, when the block ends well."""
        with self._draft() as draft:
            # Closing an object writes it, also after an error: what is half written never has the final name.
            with self._system.open_output_stream(draft) as stream:
                yield cast(BinaryIO, stream)
            if self._system.type_name == "s3" and self._system.get_file_info(draft).size > _MAX_S3_COPY:
                fs.copy_files(draft, self._target, source_filesystem=self._system, destination_filesystem=self._system)
            else:
                self._system.move(draft, self._target)

    def remove(self, first: str) -> None:
        """Remove the folder with all that was written to it, the file `first` before the others."""
        self._system.delete_file(f"{self._path}/{first}")
        self._system.delete_dir(self._path)

    def _entries(self) -> list[str]:
        selector = fs.FileSelector(self._path, allow_not_found=True)
        return [info.base_name for info in self._system.get_file_info(selector)]

    @contextmanager
    def _draft(self) -> Iterator[str]:
        """Yield a path to write to, removed at the end unless it was moved."""
        draft = f"{self._path}/{_DRAFT}{secrets.token_hex(8)}"
        try:
            yield draft
        finally:
            with contextlib.suppress(OSError):
                if self._system.get_file_info(draft).type != fs.FileType.NotFound:
                    self._system.delete_file(draft)


class RemotePlace:
    """The place of a file that is not on this machine; see `Place`."""

    def __init__(self, system: fs.FileSystem, path: str) -> None:
        """Name it; nothing is asked of the file system."""
        self._system, self._path = system, path
        self.name = f"{system.type_name}://{path}"
        self.parts = RemoteFolder(system, path)

    def open(self) -> BinaryIO:
        """Open the file to read, anywhere in it."""
        try:
            stream = self._system.open_input_file(self._path)
        except pyarrow.ArrowException as error:
            raise InputError(f"{self.name}: cannot be read ({first_line(error)}); check the place") from error
        return cast(BinaryIO, io.BufferedReader(stream, 1 << 20))

    def stamp(self) -> tuple[int, int]:
        """Return size in bytes and time of the last change, in nanoseconds."""
        found = self._system.get_file_info(self._path)
        return found.size or 0, found.mtime_ns or 0

    def locked(self) -> AbstractContextManager[None]:
        """Do nothing: stores have no locks. Two runs do the work twice, and what they write is equal."""
        return nullcontext()
