"""The border to the library `tokenizers`: behind it what is raised, and what panics, is an error of tfexport."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tfexport.errors import TfexportError


@contextmanager
def border(refused: Callable[[str], TfexportError]) -> Iterator[None]:
    """Call the library inside this block.

    It raises nothing more special than `Exception`. What panics in its Rust comes as a `BaseException` of a class that
    cannot be imported; Ctrl-C and the end of the program pass.

    Args:
        refused: makes the error from the library's own words, on one line.
    """
    try:
        yield
    except TfexportError:
        raise
    except Exception as error:
        raise refused(" ".join(str(error).split()) or type(error).__name__) from error
    except BaseException as error:
        if not is_panic(error):
            raise
        raise refused("tokenizers panicked: " + " ".join(str(error).split())) from error


def is_panic(error: BaseException | None) -> bool:
    """Say whether an exception is a panic of a library in Rust."""
    return type(error).__module__ == "pyo3_runtime"
