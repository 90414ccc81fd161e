"""Read JSON strictly, and seal JSON objects with their own hash."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from tfexport._io.extras import extra_command
from tfexport.errors import BundleError, ConfigError, shortened

T = TypeVar("T")

MAX_CONFIG_BYTES = 1024 * 1024
MAX_DEPTH = 100  # below Python's recursion limit, because values are compared and written recursively
_MAX_LISTED = 8


def parse_json(raw: bytes) -> Any:
    """Read JSON in UTF-8 without a byte order mark.

    Raises ValueError, also for what Python accepts: NaN, Infinity, numbers such as 1e999, more than MAX_DEPTH levels,
    half of a surrogate pair, or duplicate keys.
    """
    duplicates: list[str] = []

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        data = dict(pairs)
        if len(data) < len(pairs):
            duplicates.extend(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        return data

    try:
        data = json.loads(raw.decode(), object_pairs_hook=unique, parse_constant=_finite, parse_float=_finite)
        if rb"\u" in raw:  # a lone surrogate can only be written as an escape
            json.dumps(data, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except UnicodeEncodeError as error:
        raise ValueError("a text has half of a surrogate pair, expected whole characters") from error
    if duplicates:
        raise ValueError("; ".join(f"key {key[:80]} is given twice, expected once" for key in duplicates[:_MAX_LISTED]))
    if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH:
        _check_depth(data)
    return data


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{shortened(text)} is not a finite number")
    return number


def _check_depth(data: object) -> None:
    level = [data]
    for _ in range(MAX_DEPTH + 1):
        containers = [value for value in level if isinstance(value, dict | list)]
        if not containers:
            return
        level = [part for value in containers for part in (value.values() if isinstance(value, dict) else value)]
    raise ValueError(f"it is nested more than {MAX_DEPTH} deep")


def plain_problem(path: Path) -> str | None:
    """Return why `path` is not a plain file, or None if it is."""
    if path.is_file():  # reading a pipe or a device might never end
        return None
    return "is not a plain file" if os.path.lexists(path) else "is missing"


def read_json(path: Path, name: str) -> Any:
    """Read a file of at most 1 MiB as `parse_json`; a ConfigError begins with `name`."""
    if problem := plain_problem(path):
        raise ConfigError(f"{name}: {problem}; a model directory has config.json and model.safetensors")
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise ConfigError(f"{name} has {path.stat().st_size} bytes, the limit is {MAX_CONFIG_BYTES}; check the file")
    try:
        return parse_json(path.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{name} is not JSON ({error}); save it again as JSON in UTF-8") from error


# ---- sealed JSON


def render(data: dict[str, Any]) -> bytes:
    """Serialize a JSON object; equal objects give equal bytes."""
    return (json.dumps(data, indent=2, sort_keys=True, allow_nan=False) + "\n").encode()


def parse(raw: bytes, name: str, remedy: str) -> dict[str, Any]:
    """Read a JSON object strictly; errors begin with `name` and end with `remedy`."""
    try:
        data = parse_json(raw)
    except ValueError as error:
        raise BundleError(f"{name} is not JSON ({error}); {remedy}") from error
    if not isinstance(data, dict):
        raise BundleError(f"{name} is {shortened(data)}, expected an object; {remedy}")
    return data


def seal(data: dict[str, Any]) -> bytes:
    """Serialize a JSON object together with its own hash, `self_sha256`."""
    return render(data | {"self_sha256": _sum(render(data))})


def unseal(raw: bytes, read: Callable[[dict[str, Any]], T], *, name: str, format_version: int, remedy: str) -> T:
    """Read an object that `seal` wrote; `read` converts it, without its hash."""
    data = parse(raw, name, remedy)
    version = data.get("format_version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise BundleError(f"{name}: format_version is {shortened(version)}, expected {format_version}; {remedy}")
    if version > format_version:
        raise BundleError(
            f"it was made by a newer tfexport (format {version}, this one reads {format_version}); "
            f"upgrade with: {extra_command('')}"
        )
    claimed = data.pop("self_sha256", None)
    try:
        value = read(data)
    except ConfigError as error:
        raise BundleError(*error.problems, subject=error.subject, remedy=remedy) from error
    if render(data | {"self_sha256": claimed}) != raw or claimed != _sum(_without(raw, claimed)):
        raise BundleError(f"{name} was changed; copy it again from its source or {remedy}")
    return value


def _without(sealed: bytes, claimed: object) -> bytes:
    # Faster than rendering the object again without its hash.
    before, _, after = sealed.partition(f'\n  "self_sha256": "{claimed}"'.encode())
    return before + after[1:] if after.startswith(b",") else before[:-1] + after


def _sum(rendered: bytes) -> str:
    return hashlib.sha256(rendered).hexdigest()
