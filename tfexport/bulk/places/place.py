"""What a run asks of the place of a file, and how it says that it cannot be read or written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import BinaryIO, Protocol

from tfexport.errors import InputError, first_line

PARTS = ".parts"


class Folder(Protocol):
    """The folder beside an output in which its parts are kept.

    Attributes:
        name: for messages.
    """

    name: str

    def names(self) -> frozenset[str]:
        """List the files that are whole; none where there is no folder."""
        ...

    def read(self, name: str) -> bytes:
        """Return the bytes of a file."""
        ...

    def make(self) -> None:
        """Make the folder where it is missing."""
        ...

    def write(self, name: str, data: bytes) -> None:
        """Write a file whole or not at all; the folder is there."""
        ...

    def clear(self) -> None:
        """Remove what killed writers have left half done."""
        ...

    def publish(self) -> AbstractContextManager[BinaryIO]:
        """Yield a stream; what is written to it lies in the folder's place, whole, when the block ends well."""
        ...

    def remove(self, first: str) -> None:
        """Remove the folder with all that was written to it, the file `first` before the others."""
        ...


class Place(Protocol):
    """The place of one file.

    Attributes:
        name: for messages, without credentials.
    """

    name: str

    @property
    def parts(self) -> Folder:
        """The folder beside it."""
        ...

    def open(self) -> BinaryIO:
        """Open the file to read, anywhere in it."""
        ...

    def stamp(self) -> tuple[int, int]:
        """Return size in bytes and time of the last change, in nanoseconds."""
        ...

    def locked(self) -> AbstractContextManager[None]:
        """Be the only run that writes the file, where the place can tell."""
        ...


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Say in one line that a file cannot be read.

    Raises:
        InputError: in place of OSError.
    """
    try:
        yield
    except OSError as error:
        raise InputError(f"{name}: cannot be read ({_reason(error)}); check the place") from error


@contextmanager
def writing(name: str, kept: str = "") -> Iterator[None]:
    """Say in one line that a file cannot be written.

    Args:
        name: of the file.
        kept: where the parts lie that are done.

    Raises:
        InputError: in place of OSError.
    """
    try:
        yield
    except OSError as error:
        remedy = (
            f"repair that and run the same command again, what is done is kept in {kept}"
            if kept
            else "choose another place"
        )
        raise InputError(f"{name}: cannot be written ({_reason(error)}); {remedy}") from error


def _reason(error: OSError) -> str:
    return error.strerror or first_line(error)
