"""The tree of errors: what the file draws, what it defines and what the package offers are one."""

from __future__ import annotations

import re

import tfexport
from tfexport import errors
from tfexport.errors import TfexportError

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


def test_the_package_offers_every_error() -> None:
    assert set(CLASSES) <= set(tfexport.__all__)
