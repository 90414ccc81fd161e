"""Strict and sealed JSON: errors that Python's reader accepts, and any changed byte, are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfexport._io.strict_json import parse_json, seal, unseal
from tfexport.errors import BundleError

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(VALUES)
def test_valid_json_is_read(value: object) -> None:
    assert parse_json(json.dumps(value, ensure_ascii=False).encode(errors="surrogatepass")) == value


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (b"", "Expecting value"),
        (b"\xff", "'utf-8' codec can't decode"),
        (b"\xef\xbb\xbf{}", "BOM"),
        (b"[NaN]", "'NaN' is not a finite number"),
        (b"[-Infinity]", "'-Infinity' is not a finite number"),
        (b"[" * 200_000, "nested too deeply"),
        (b"9" * 5_000, "Exceeds the limit"),
        (b"[1e999]", "'1e999' is not a finite number"),
        (b"[-1" + b"0" * 400 + b".5]", r"'-10+… is not a finite number"),
        (b"[" * 101 + b"]" * 101, "nested more than 100 deep"),
        (b'{"a":' * 101 + b"1" + b"}" * 101, "nested more than 100 deep"),
        (rb'{"a": ["\ud800"]}', "half of a surrogate pair"),
        (rb'{"\uDFFF\ud800": 1}', "half of a surrogate pair"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}, "a": 2}', "key c is given twice, expected once; key a is given twice"),
    ],
)
def test_invalid_json_is_refused(raw: bytes, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_json(raw)


def test_many_keys_twice_make_a_short_message() -> None:
    raw = "{" + ",".join(f'"{"k" * 500}{i}": 1, "{"k" * 500}{i}": 2' for i in range(500)) + "}"
    with pytest.raises(ValueError, match="given twice") as caught:
        parse_json(raw.encode())
    assert len(str(caught.value)) < 1_000


def test_json_at_the_limits_is_read() -> None:
    assert parse_json(rb'["\ud83d\ude00", 1e308, "\\ud800"]') == ["😀", 1e308, r"\ud800"]
    deep = parse_json(b"[" * 100 + b"]" * 100)
    for _ in range(99):
        (deep,) = deep
    assert deep == []


# ---- sealed JSON

# The sum stands in the middle, at the end, and where an object inside has one of that name too.
OBJECTS: list[dict[str, Any]] = [
    {"format_version": 1, "name": "a", "versions": {"b": [1, 2.5]}},
    {"format_version": 1, "name": None},
    {"format_version": 1, "parts": {"self_sha256": "0"}, "text": "\n  "},
]


def _open(raw: bytes) -> dict[str, Any]:
    return unseal(raw, dict, name="x.json", format_version=1, remedy="make it again")


@pytest.mark.parametrize("data", OBJECTS)
def test_sealed_values_are_read_back(data: dict[str, Any]) -> None:
    assert _open(seal(data)) == data


@pytest.mark.parametrize("data", OBJECTS)
def test_any_changed_missing_or_added_byte_is_refused(data: dict[str, Any]) -> None:
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
