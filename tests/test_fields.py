"""Configurations: strict reading names every problem with its place, whatever the nesting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import pytest

from tests import tiny
from tfexport.errors import ConfigError
from tfexport.fields import Config
from tfexport.models.config import TransformerConfig


@dataclass(frozen=True, kw_only=True)
class Inner(Config, subject="inner"):
    size: int

    def _problems(self) -> list[str]:
        return [] if self.size > 0 else [f"size is {self.size}, expected 1 or more"]


@dataclass(frozen=True, kw_only=True)
class Outer(Config, subject="outer"):
    first: Inner
    second: Inner | None = None
    share: float = 0.5
    flag: bool = False
    mode: Literal["never"] | bool = False
    words: tuple[str, ...] = ()


def said(data: object) -> str:
    with pytest.raises(ConfigError) as caught:
        Outer.from_dict(data, subject="f.json")
    return str(caught.value)


def test_every_problem_is_said_at_once_with_its_place() -> None:
    data = {"first": {"size": "1", "sise": 1}, "second": {"size": 0}, "share": True, "flag": 1, "words": ["a", 2]}
    assert said(data | {"colour": "red"}) == (
        "f.json: unknown key colour; unknown key first.sise; first.size is '1', expected a whole number; "
        "second: size is 0, expected 1 or more; share is True, expected a number; "
        "flag is 1, expected true or false; words is ('a', 2), expected a list of a text"
    )


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"first": {"size": True}}, "first.size is True, expected a whole number"),
        ({"first": {"size": 1.0}}, "first.size is 1.0, expected a whole number"),
        ({"first": None}, "first is None, expected an object"),
        ({"first": []}, "first is [], expected an object"),
        ({"share": float("nan")}, "share is nan, expected a finite number"),
        ({"share": float("inf")}, "share is inf, expected a finite number"),
        ({"share": 10**400}, "expected a finite number"),
        ({"share": "0.5"}, "share is '0.5', expected a number"),
        ({"share": None}, "share is None, expected a number"),
        ({"mode": "ever"}, "mode is 'ever', expected 'never' or true or false"),
        ({"mode": 1}, "mode is 1, expected 'never' or true or false"),
        ({"words": "ab"}, "words is 'ab', expected a list of a text"),
        ({"second": False}, "second is False, expected an object"),
    ],
)
def test_nothing_is_taken_for_something_else(change: dict[str, Any], problem: str) -> None:
    message = said({"first": {"size": 1}} | change)
    assert message.startswith("f.json: ")
    assert problem in message


def test_what_is_written_is_read() -> None:
    given = Outer(first=Inner(size=2), second=None, share=1, mode="never", words=("a",))
    assert Outer.from_dict(given.to_dict()) == given
    config = tiny.config()
    assert TransformerConfig.from_dict(config.to_dict()) == config


def test_what_is_made_in_python_is_checked_alike() -> None:
    with pytest.raises(ConfigError, match="inner: size is True, expected a whole number"):
        Inner(size=True)
    with pytest.raises(ConfigError, match="outer: first is 1, expected an object; flag is 0, expected true or false"):
        Outer(first=1, flag=0)  # type: ignore[arg-type]
