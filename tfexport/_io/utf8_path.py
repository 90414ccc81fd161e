"""A path for libraries in C++, which take no name that is no UTF-8."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def utf8_path(path: Path) -> Iterator[str]:
    """Yield a text that leads to a file while the block runs, and to what lies beside it.

    Args:
        path: of a file whose own name is UTF-8; only on Linux do other folders have names that are not.
    """
    try:
        str(path).encode()
    except UnicodeEncodeError:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            yield f"/proc/self/fd/{folder}/{path.name}"
        finally:
            os.close(folder)
    else:
        yield str(path)
