"""The tree of errors: what the file draws, what it defines and what the package offers are one."""

from __future__ import annotations

import pickle
import re

import pytest

import tfexport
from tfexport import errors
from tfexport.errors import InputError, QueueFull, TfexportError, raise_all

CLASSES = {
    name: value for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)
}


def test_the_drawing_has_every_class_its_parent_and_its_sentence() -> None:
    lines = re.findall(r"^(│   )?[├└]── (\w+) +(.+)$", errors.__doc__ or "", re.MULTILINE)
    assert {name for _, name, _ in lines} | {"TfexportError"} == set(CLASSES)
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


def test_places_are_told_once_and_in_order() -> None:
    with pytest.raises(InputError) as caught:
        raise_all(InputError, "input", ["a", "b", "c"], indices=[4, 4, 7])
    assert caught.value.indices == (4, 7)
    assert TfexportError("x").indices == ()


def test_the_package_offers_every_error() -> None:
    assert set(CLASSES) <= set(tfexport.__all__)
