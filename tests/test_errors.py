"""The tree of errors: what the file draws, what it defines and what the package offers are one."""

from __future__ import annotations

import re

import tfexport
from tfexport import errors
from tfexport.errors import TfexportError


def test_the_drawing_has_every_class_and_its_sentence() -> None:
    drawn = dict(re.findall(r"^[├└]── (\w+) +(.+)$", errors.__doc__ or "", re.MULTILINE))
    classes = {name: value for name, value in vars(errors).items() if isinstance(value, type)}
    assert set(drawn) | {"TfexportError"} == set(classes)
    for name, sentence in drawn.items():
        assert classes[name].__bases__ == (TfexportError,)
        assert (classes[name].__doc__ or "").lower().startswith(sentence.lower())


def test_the_package_offers_every_error() -> None:
    names = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert names == {name for name in tfexport.__all__ if name.endswith("Error")}
