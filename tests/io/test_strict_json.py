"""Strict JSON: what Python's reader lets through is refused, in one line of words."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfexport._io.strict_json import parse_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(VALUES)
def test_what_is_json_is_read(value: object) -> None:
    assert parse_json(json.dumps(value, ensure_ascii=False).encode(errors="surrogatepass")) == value


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (b"", "Expecting value"),
        (b"\xff", "'utf-8' codec can't decode"),
        (b"\xef\xbb\xbf{}", "BOM"),
        (b"[NaN]", "NaN is no JSON number"),
        (b"[-Infinity]", "-Infinity is no JSON number"),
        (b"[" * 200_000, "nested too deeply"),
        (b"9" * 5_000, "Exceeds the limit"),
        (b"[1e999]", "'1e999' is too large for a number"),
        (b"[-1" + b"0" * 400 + b".5]", r"'-10+… is too large for a number"),
        (b"[" * 101 + b"]" * 101, "nested more than 100 deep"),
        (b'{"a":' * 101 + b"1" + b"}" * 101, "nested more than 100 deep"),
        (rb'{"a": ["\ud800"]}', "half of a surrogate pair"),
        (rb'{"\uDFFF\ud800": 1}', "half of a surrogate pair"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}, "a": 2}', "key c is given twice, expected once; key a is given twice"),
    ],
)
def test_what_is_none_is_refused(raw: bytes, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_json(raw)


def test_many_keys_twice_make_a_short_message() -> None:
    raw = "{" + ",".join(f'"{"k" * 500}{i}": 1, "{"k" * 500}{i}": 2' for i in range(500)) + "}"
    with pytest.raises(ValueError, match="given twice") as caught:
        parse_json(raw.encode())
    assert len(str(caught.value)) < 1_000


def test_what_is_just_allowed_is_read() -> None:
    assert parse_json(rb'["\ud83d\ude00", 1e308, "\\ud800"]') == ["😀", 1e308, r"\ud800"]
    deep = parse_json(b"[" * 100 + b"]" * 100)
    for _ in range(99):
        (deep,) = deep
    assert deep == []
