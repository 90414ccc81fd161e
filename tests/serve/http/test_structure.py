"""The structure of a body is counted as whoever walks through it counts, whatever stands in its strings."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.exceptions import HTTPException

from tfexport.serve.http import structure
from tfexport.serve.http.body import parse_object
from tfexport.serve.http.structure import (
    MAX_DEPTH,
    MAX_DIGITS,
    MAX_PARTS,
    MAX_VALUES,
    check_structure,
    strings_and_rest,
)

TEXTS = st.text(st.sampled_from('"\\[]{},:aé\n\ud83d'), max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner),
    max_leaves=40,
)


def walk(value: object) -> tuple[int, int]:
    """Count levels and parts."""
    if isinstance(value, str):
        return 0, 1
    if not isinstance(value, list | dict):
        return 0, 0
    inner = [walk(one) for one in (value.values() if isinstance(value, dict) else value)]
    keys = len(value) if isinstance(value, dict) else 0
    return 1 + max((depth for depth, _ in inner), default=0), 1 + keys + sum(parts for _, parts in inner)


def refused(raw: bytes) -> str:
    try:
        check_structure(*strings_and_rest(raw))
    except HTTPException as error:
        return error.detail
    return ""


@settings(max_examples=40)
@given(VALUES, st.booleans(), st.sampled_from([None, 1]))
def test_it_counts_what_there_is(value: object, is_ascii: bool, indent: int | None) -> None:
    raw = json.dumps(value, ensure_ascii=is_ascii, indent=indent).encode(errors="surrogatepass")
    depth, parts = walk(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(structure, "MAX_DEPTH", depth)
        patch.setattr(structure, "MAX_PARTS", max(parts, 1))
        assert refused(raw) == ""
        if depth:
            patch.setattr(structure, "MAX_DEPTH", depth - 1)
            assert "nested more than" in refused(raw)
            patch.setattr(structure, "MAX_DEPTH", depth)
        if parts:
            patch.setattr(structure, "MAX_PARTS", parts - 1)
            assert "lists, objects, strings and fractions" in refused(raw)


@pytest.mark.parametrize(
    "unit",
    [b"{}", b"[]", b'""', b'"\\""', b'{"a":1}', b'"\\\\"', b"[" * 90 + b"]" * 90, b'{"":' * 90 + b"1" + b"}" * 90],
)
def test_many_parts_are_refused_before_they_are_read(unit: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(raw: bytes) -> Any:
        raise AssertionError("it was read")

    monkeypatch.setattr("tfexport.serve.http.body.parse_json", never)
    raw = b'{"a":[' + b",".join([unit] * (2**20 // (len(unit) + 1))) + b"]}"
    with pytest.raises(HTTPException) as error:
        parse_object(raw)
    assert error.value.detail == f"the body has more than {MAX_PARTS} lists, objects, strings and fractions; send fewer"


def test_depth_is_refused_before_it_is_read() -> None:
    assert refused(b"[" * MAX_DEPTH) == ""
    for raw in (b"[" * (MAX_DEPTH + 1), b"[" * 2**20, b'{"a":' * 2**17):
        assert refused(raw) == f"the body is nested more than {MAX_DEPTH} deep"


def test_a_request_may_have_many_numbers_and_long_texts() -> None:
    assert len(parse_object(b'{"a":[' + b",".join([b"12345"] * 150_000) + b"]}")["a"]) == 150_000
    text = '[{"\\' * 200_000
    assert parse_object(json.dumps({"a": text}).encode())["a"] == text


def test_numbers_are_bounded_too() -> None:
    assert refused(b'{"a":[' + b",".join([b"1"] * 2**19) + b"]}") == (
        f"the body has more than {MAX_VALUES} values; send fewer, or tensors as bytes"
    )
    digits = f"the body has a number of more than {MAX_DIGITS} digits; send smaller ones"
    assert refused(b'{"a":' + b"12" * (MAX_DIGITS // 2) + b"}") == ""
    assert refused(b'{"a":1' + b"12" * (MAX_DIGITS // 2) + b"}") == digits
    assert refused(b'{"a":"1' + b"12" * MAX_DIGITS + b'"}') == ""


@settings(max_examples=40)
@given(st.lists(st.sampled_from(["\\ud83d", "\\uDE00", "\\\\", '\\"', "\\u0041", "a", "é", "ud83d"]), max_size=6))
def test_halves_of_surrogate_pairs_are_found_wherever_they_are(pieces: list[str]) -> None:
    raw = f'{{"a": ["{"".join(pieces)}", 5]}}'
    is_whole = all(ord(one) not in range(0xD800, 0xE000) for one in json.loads(raw)["a"][0])
    with contextlib.nullcontext() if is_whole else pytest.raises(HTTPException, match="half of a surrogate pair"):
        assert parse_object(raw.encode()) == json.loads(raw)


@pytest.mark.parametrize("unit", [b"1.5", b"1e5", b"-1E5"])
def test_fractions_are_parts_and_words_with_an_e_are_none(unit: bytes) -> None:
    assert "strings and fractions" in refused(b'{"a":[' + b",".join([unit] * (MAX_PARTS + 1)) + b"]}")
    assert refused(b'{"a":[' + b",".join([unit, b"true", b"false", b"null"] * (MAX_PARTS // 2)) + b"]}") == ""
