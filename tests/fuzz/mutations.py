"""Strategies that damage bytes and JSON."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import strategies as st

# ---- bytes

_NUMBERS = [0, 1, 2, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1]
# Headers and trailers hold most of what a reader relies on.
_PLACES = st.one_of(
    st.integers(0, 2**20).map(lambda share: ("share", share)),
    st.integers(0, 300).map(lambda offset: ("start", offset)),
    st.integers(0, 300).map(lambda offset: ("end", offset)),
)
_EDITS = st.tuples(
    st.sampled_from(["flip", "flip", "set", "cut", "drop", "repeat", "insert", "number"]),
    _PLACES,
    st.one_of(st.integers(0, 16), st.integers(0, 5000)),
    st.sampled_from(_NUMBERS),
    st.binary(max_size=12),
)


def mutated(original: bytes) -> st.SearchStrategy[bytes]:
    """Return the original with one to three changes."""
    return st.lists(_EDITS, min_size=1, max_size=3).map(lambda edits: _edited(original, edits))


def _edited(original: bytes, edits: list[Any]) -> bytes:
    data = bytearray(original)
    for kind, (anchor, offset), size, number, raw in edits:
        if not data:
            break
        at = {"share": offset * len(data) >> 20, "start": offset, "end": len(data) - 1 - offset}[anchor] % len(data)
        end = min(len(data), at + size + 1)
        match kind:
            case "flip":
                data[at] ^= 1 << size % 8
            case "set":
                data[at] = number % 256
            case "cut":
                del data[at:]
            case "drop":
                del data[at:end]
            case "repeat":
                data[at:at] = data[at:end]
            case "insert":
                data[at:at] = raw
            case "number":
                width = min(len(data) - at, 4 if size % 2 else 8)
                data[at : at + width] = number.to_bytes(8, "little")[:width]
    return bytes(data)


# ---- JSON


class Raw(str):
    """A value as JSON, valid or not."""


class Pairs(list[list[Any]]):
    """An object, which may have duplicate keys."""


_ODD = [
    *"null true false 0 -1 1 2 1.5 -0.0 1e999 -1e999 1e308 1e-320 NaN -Infinity {} [] [null] [[]] [-1] [1,2,3]".split(),
    *map(str, (2**31, 2**53, 2**63, 2**64, -(2**63), 10**9, 10**30)),
    "9" * 5000,
    *map(json.dumps, ["", " ", "a", "none", "auto", "../x", "/etc/passwd", "\0", "\u202e", "é", "[PAD]", "x" * 3000]),
    *(r'"\ud800"', r'"\udfff\ud800"', '"\\u0000"', '"(a+)+$"', '"(?<n>"', '"\\\\p{L}*"'),
    "[" * 200 + "]" * 200,
    "[" * 100_000,
    '{"a":' * 300 + "1" + "}" * 300,
    '{"type":"Sequence"}',
    "'", "}", ",", "",
]  # fmt: skip
_CHANGES = st.tuples(
    st.sampled_from(["odd", "odd", "odd", "drop", "twice", "name", "nest"]),
    st.lists(st.integers(0, 10_000), min_size=1, max_size=7),
    st.sampled_from(_ODD),
)


def mutated_json(document: Any) -> st.SearchStrategy[bytes]:
    """Return a document with one to three changes of values, keys or places."""
    return st.lists(_CHANGES, min_size=1, max_size=3).map(lambda changes: _changed(document, changes))


def _changed(document: Any, changes: list[Any]) -> bytes:
    root = [_loose(document)]
    for kind, path, odd in changes:
        held, index = _slot(root, path)
        item = held[index]
        is_pair = isinstance(held, Pairs)
        value = item[1] if is_pair else item
        match kind:
            case "odd":
                value = Raw(odd)
            case "nest":
                value = [value]
            case "name" if is_pair:
                item[0] = odd[:50]
            case "twice":
                held.insert(index, copy.deepcopy(item))
            case "drop" if held is not root:
                del held[index]
                continue
        if is_pair:
            held[index][1] = value
        else:
            held[index] = value
    return _written(root[0]).encode("utf-8", "surrogatepass")


def _loose(value: Any) -> Any:
    if isinstance(value, dict):
        return Pairs([key, _loose(inner)] for key, inner in value.items())
    return [_loose(inner) for inner in value] if isinstance(value, list) else value


def _slot(root: list[Any], path: list[int]) -> tuple[list[Any], int]:
    """Go down from the root, one number per level; return the last list and index."""
    held, index = root, 0
    for number in path:
        value = held[index][1] if isinstance(held, Pairs) else held[index]
        if not isinstance(value, list) or not value:
            break
        held, index = value, number % len(value)
    return held, index


def _written(value: Any) -> str:
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, Pairs):
        return "{" + ",".join(f"{json.dumps(key)}:{_written(inner)}" for key, inner in value) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_written, value)) + "]"
    return json.dumps(value)
