"""The tree of errors: what the file draws, what it defines and what the package offers are one."""

from __future__ import annotations

import re

import tfexport
from tfexport import errors
from tfexport.errors import TfexportError

CLASSES = {
    name: value for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)
}


def test_the_drawing_has_every_class_and_its_sentence() -> None:
    drawn = dict(re.findall(r"^[├└]── (\w+) +(.+)$", errors.__doc__ or "", re.MULTILINE))
    assert set(drawn) | {"TfexportError"} == set(CLASSES)
    for name, sentence in drawn.items():
        assert CLASSES[name].__bases__ == (TfexportError,)
        assert (CLASSES[name].__doc__ or "").lower().startswith(sentence.lower())


def test_the_package_offers_every_error() -> None:
    assert set(CLASSES) == {name for name in tfexport.__all__ if name.endswith("Error")}
