"""Paths as callers give them: refused where the operating system could not even be asked."""

from __future__ import annotations

import os
from pathlib import Path

from tfexport.errors import ConfigError, shortened


def checked_path(value: object, name: str) -> Path:
    """Return a path that a caller gives; whether anything lies there is not asked.

    Args:
        value: a text or a path.
        name: of the argument, for the error.

    Raises:
        ConfigError: it is neither, or holds what no path can: a null character, or half of a surrogate pair.
    """
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else value
    if not isinstance(text, str):
        raise ConfigError(f"{name} is {shortened(value)}, expected a path as text")
    try:
        encoded = os.fsencode(text)
    except UnicodeEncodeError as error:
        raise ConfigError(f"{name} is {shortened(text)}, which is not valid Unicode; check the path") from error
    if b"\0" in encoded:
        raise ConfigError(f"{name} is {shortened(text)}, and no path has a null character; check the path")
    return Path(text)
