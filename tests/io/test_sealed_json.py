"""Sealed JSON: what was sealed comes back, and no byte of it may differ."""

from __future__ import annotations

from typing import Any

import pytest

from tfexport._io.sealed_json import seal, unseal
from tfexport.errors import BundleError

# The sum stands in the middle, at the end, and where an object inside has one of that name too.
OBJECTS: list[dict[str, Any]] = [
    {"format_version": 1, "name": "a", "versions": {"b": [1, 2.5]}},
    {"format_version": 1, "name": None},
    {"format_version": 1, "parts": {"self_sha256": "0"}, "text": "\n  "},
]


def _open(raw: bytes) -> dict[str, Any]:
    return unseal(raw, dict, name="x.json", format_version=1, remedy="make it again")


@pytest.mark.parametrize("data", OBJECTS)
def test_what_was_sealed_comes_back(data: dict[str, Any]) -> None:
    assert _open(seal(data)) == data


@pytest.mark.parametrize("data", OBJECTS)
def test_no_byte_may_be_changed_left_out_or_added(data: dict[str, Any]) -> None:
    raw = seal(data)
    for place in range(len(raw)):
        before, byte, behind = raw[:place], raw[place], raw[place + 1 :]
        for changed in (before + behind, before + bytes([byte ^ 1]) + behind, before + b" " + raw[place:]):
            with pytest.raises(BundleError, match=r"^x\.json"):
                _open(changed)


def test_another_order_is_a_change() -> None:
    head, *entries, tail = seal(OBJECTS[0]).splitlines(keepends=True)
    of_sum = next(entry for entry in entries if b"self_sha256" in entry)
    entries.remove(of_sum)
    with pytest.raises(BundleError, match="was changed"):
        _open(b"".join([head, of_sum, *entries, tail]))
