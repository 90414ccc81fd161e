"""The tree of errors: what the file draws, what it defines and what the package offers are one."""

from __future__ import annotations

import pickle
import re
import tracemalloc
from array import array
from collections import OrderedDict
from collections.abc import Callable
from functools import reduce
from typing import Any

import pytest

import tfexport
from tfexport import errors
from tfexport.errors import InputError, QueueFull, TfexportError, raise_all, shortened

CLASSES = {
    name: value for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)
}


def test_the_drawing_has_every_class_its_parent_and_its_sentence() -> None:
    lines = re.findall(r"^(│   )?[├└]── (\w+) +(.+)$", errors.__doc__ or "", re.MULTILINE)
    assert {name for _, name, _ in lines} | {"TfexportError"} == set(CLASSES) <= set(tfexport.__all__)
    parent = TfexportError
    for nested, name, sentence in lines:
        if not nested:
            parent = TfexportError
        assert CLASSES[name].__bases__ == (parent,)
        assert sentence_of(CLASSES[name]).startswith(sentence.lower())
        if not nested:
            parent = CLASSES[name]


def sentence_of(kind: type[Exception]) -> str:
    return " ".join((kind.__doc__ or "").split()).lower()


def test_every_error_crosses_processes_whole() -> None:
    for kind in CLASSES.values():
        error = kind("what, got, expected, remedy")
        error.indices = (1, 3)  # type: ignore[attr-defined]
        found = pickle.loads(pickle.dumps(error))
        assert (type(found), str(found), found.indices) == (kind, str(error), (1, 3))
    full = pickle.loads(pickle.dumps(QueueFull("later", retry_after_s=7)))
    assert full.retry_after_s == 7


def test_every_message_is_one_printable_line() -> None:
    for kind in CLASSES.values():
        assert str(kind("a\nb\x1b[31m\u202e")) == r"a\nb\x1b[31m\u202e"


def test_an_error_carries_the_parts_of_its_message() -> None:
    error = InputError("a is 1, expected 2", "b is missing", subject="x.json", remedy="write it again")
    assert (error.subject, error.problems) == ("x.json", ("a is 1, expected 2", "b is missing"))
    assert (error.remedy, error.reason) == ("write it again", "a is 1, expected 2; b is missing")
    assert str(error) == "x.json: a is 1, expected 2; b is missing; write it again"
    found = pickle.loads(pickle.dumps(error))
    assert vars(found) == vars(error)
    whole = TfexportError("x.json: is missing; write it again")
    assert (whole.subject, whole.problems, whole.remedy) == ("", (str(whole),), "")


def test_the_message_has_twenty_problems_and_the_error_all() -> None:
    problems = [f"value {index} is wrong" for index in range(23)]
    with pytest.raises(InputError) as caught:
        raise_all(InputError, "input", problems)
    assert caught.value.problems == tuple(problems)
    assert str(caught.value).endswith("value 19 is wrong; and 3 more")
    raise_all(InputError, "input", [])
    with pytest.raises(InputError) as caught:
        raise_all(InputError, "input", ["a", "b", "c"], indices=[4, 4, 7])
    assert caught.value.indices == (4, 7)


@pytest.mark.parametrize(
    "value",
    [
        None, True, 3, 0.5, 10**30, "a'b\n", b"ab", bytearray(b"ab"), (), (1,), (1, "b"), [], [1, [2, (3,)]], {}, set(),
        {1, 2}, frozenset({3}), {"a": {1: [2]}, (): None}, range(10), array("i", [1, 2]), OrderedDict(a=1), int,
    ],
)  # fmt: skip
def test_a_short_value_is_spelled_as_python_does(value: object) -> None:
    assert shortened(value) == repr(value)
    assert shortened([value] * 40) == (repr([value] * 40)[:80] + "…")


MILLION = 10**6
HUGE: dict[str, Callable[[], Any]] = {
    "text": lambda: "a" * MILLION,
    "lists": lambda: [["a" * MILLION] * 1000] * 10,
    "dict": lambda: dict.fromkeys(range(MILLION)),
    "set": lambda: set(range(MILLION)),
    "array": lambda: array("i", [0]) * MILLION,
    "deep": lambda: reduce(lambda inner, _: [inner], range(50_000), list[Any]()),
    "range": lambda: range(10**30),
    "number": lambda: 10**5000,
}


@pytest.mark.parametrize("name", HUGE)
def test_only_the_beginning_of_a_huge_value_is_read(name: str) -> None:
    value = HUGE[name]()
    tracemalloc.start()
    try:
        found = shortened(value)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0 < len(found) <= 81
    assert peak < 100_000
    own = {"number": "int that cannot be printed", "array": "array with 1000000 entries", "range": repr(range(10**30))}
    assert found == own.get(name, found[:80] + "…")
