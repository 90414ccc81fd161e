"""Sealed JSON: objects that contain their own hash, with deterministic bytes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any, TypeVar

from tfexport._io.extras import extra_command
from tfexport._io.strict_json import parse_json
from tfexport.errors import BundleError, ConfigError, shortened

T = TypeVar("T")


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
    """Read an object that `seal` wrote.

    Args:
        raw: content of the file.
        read: builds the value from the object without its hash; its ConfigError lists every wrong value.
        name: of the file, for errors.
        format_version: newest supported version.
        remedy: for a damaged file.

    Raises:
        BundleError: it is not JSON, was changed or was made by a newer version; lists every wrong value.
    """
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
    before, _, behind = sealed.partition(f'\n  "self_sha256": "{claimed}"'.encode())
    return before + behind[1:] if behind.startswith(b",") else before[:-1] + behind


def _sum(rendered: bytes) -> str:
    return hashlib.sha256(rendered).hexdigest()
