"""Check paths that callers pass in."""

from __future__ import annotations

import os
from pathlib import Path

from tfexport.errors import ConfigError, shortened


def checked_path(value: object, name: str) -> Path:
    """Return a caller's path, which need not exist.

    Raises:
        ConfigError: it is not a path, contains a null character or is not UTF-8, which ONNX Runtime needs.
    """
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else value
    if not isinstance(text, str):
        raise ConfigError(f"{name} is {shortened(value)}, expected a path as text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{name} is {shortened(text)}, which is not valid UTF-8; rename the folder") from error
    if "\0" in text:
        raise ConfigError(f"{name} is {shortened(text)}, and no path has a null character; check the path")
    return Path(text)
