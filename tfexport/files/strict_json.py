"""Strict JSON: read more strictly than Python does by itself, and from plain files up to a limit."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

from tfexport.errors import ConfigError

MAX_CONFIG_BYTES = 1024 * 1024
_MAX_LISTED = 8


def parse_json(raw: bytes) -> Any:
    """Read JSON in UTF-8 without a byte order mark.

    Raises:
        ValueError: says why it is none; also for NaN and Infinity, for what is nested too deeply, and for keys given
            twice, where Python would keep the last.
    """
    twice: list[str] = []

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        data = dict(pairs)
        if len(data) < len(pairs):
            twice.extend(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        return data

    try:
        data = json.loads(raw.decode("utf-8"), object_pairs_hook=unique, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if twice:
        raise ValueError("; ".join(f"key {key[:80]} is given twice, expected once" for key in twice[:_MAX_LISTED]))
    return data


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON number")


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
        ConfigError: no plain file, too large, or not JSON, see `parse_json`.
        OSError: the file cannot be read.
    """
    if problem := plain_problem(path):
        raise ConfigError(f"{name}: {problem}; a model directory has config.json and model.safetensors")
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise ConfigError(f"{name} has {path.stat().st_size} bytes, the limit is {MAX_CONFIG_BYTES}; check the file")
    try:
        return parse_json(path.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{name} is not JSON ({error}); save it again as JSON in UTF-8") from error
