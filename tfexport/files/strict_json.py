"""Small files of any origin: plain ones only, up to a limit, and JSON read more strictly than Python does by itself."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

from tfexport.errors import ConfigError, raise_all

MAX_CONFIG_BYTES = 1024 * 1024


def plain_problem(path: Path) -> str | None:
    """Say why `path` cannot be read as a file, or None; a pipe or a device would be read for ever.

    Raises:
        OSError: the directory cannot be searched, or the name cannot be one.
    """
    if path.is_file():
        return None
    return "is not a plain file" if os.path.lexists(path) else "is missing"


def read_json(path: Path, name: str) -> Any:
    """Read a configuration file of at most 1 MiB.

    Args:
        path: of the file; a symbolic link to one will do.
        name: of the file, for the error.

    Raises:
        ConfigError: no plain file, too large, not UTF-8, not JSON, or keys given twice, where Python would keep the
            last.
        OSError: the file cannot be read.
    """
    if problem := plain_problem(path):
        raise ConfigError(f"{name}: {problem}; a model directory has config.json and model.safetensors")
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise ConfigError(f"{name} has {path.stat().st_size} bytes, the limit is {MAX_CONFIG_BYTES}; check the file")
    duplicates: list[str] = []

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        duplicates.extend(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        return dict(pairs)

    try:
        data = json.loads(path.read_bytes().decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name} is not JSON: {error}; save it again as JSON in UTF-8") from error
    raise_all(ConfigError, name, [f"key {key[:80]} is given twice, expected once" for key in duplicates])
    return data
