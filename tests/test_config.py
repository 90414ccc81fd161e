"""Configurations: strict reading names every problem with its place, whatever the nesting."""

from __future__ import annotations

import dataclasses
import json
import pickle
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import pytest

from tests import tiny
from tfexport.config import Config, Ge, Gt, Help, Le, Lt, Sha256, read_as, settings
from tfexport.errors import ConfigError
from tfexport.nn.config import TransformerConfig


class Inner(Config, subject="inner"):
    size: int

    def _problems(self) -> list[str]:
        return [] if self.size > 0 else [f"size is {self.size}, expected 1 or more"]


class Sized(Config, subject="sized"):
    rows: Annotated[int, Ge(1), Le(64), Help("Rows of a batch.")] = 8
    share: Annotated[float | None, Gt(0), Lt(1)] = None
    ids: tuple[Annotated[int, Ge(0)], ...] = ()
    words: tuple[tuple[Annotated[int, Ge(0)], ...], ...] = ()
    threads: Annotated[int, Ge(1)] | Literal["auto"] = "auto"
    sums: Mapping[str, Sha256] = dataclasses.field(default_factory=dict)
    parts: Mapping[str, Inner] = dataclasses.field(default_factory=dict)
    rest: Mapping[str, Any] | None = None
    several: tuple[Inner, ...] = ()

    @classmethod
    def _upgraded(cls, data: dict[str, Any]) -> dict[str, Any]:
        return {"rows" if name == "lines" else name: value for name, value in data.items()}

    def _problems(self) -> list[str]:
        return ["rows is 13, expected luck"] if self.rows == 13 else []


class Outer(Config, subject="outer"):
    first: Inner
    second: Inner | None = None
    share: float = 0.5
    flag: bool = False
    mode: Literal["never"] | bool = False
    words: tuple[str, ...] = ()


def error_of(data: object) -> str:
    with pytest.raises(ConfigError) as caught:
        Outer.from_dict(data, subject="f.json")
    return str(caught.value)


def test_all_problems_are_reported_at_once_with_their_place() -> None:
    data = {"first": {"size": "1", "sise": 1}, "second": {"size": 0}, "share": True, "flag": 1, "words": ["a", 2]}
    assert error_of(data | {"colour": "red"}) == (
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
        ({"share": float("nan")}, "share is nan, expected a finite number"),
        ({"share": 10**400}, "expected a finite number"),
        ({"share": "0.5"}, "share is '0.5', expected a number"),
        ({"mode": "ever"}, "mode is 'ever', expected 'never' or true or false"),
        ({"mode": 1}, "mode is 1, expected 'never' or true or false"),
        ({"words": "ab"}, "words is 'ab', expected a list of a text"),
    ],
)
def test_values_are_not_coerced_to_other_types(change: dict[str, Any], problem: str) -> None:
    message = error_of({"first": {"size": 1}} | change)
    assert message.startswith("f.json: ")
    assert problem in message


def test_what_is_written_is_read_back() -> None:
    given = Outer(first=Inner(size=2), second=None, share=1, mode="never", words=("a",))
    assert Outer.from_dict(given.to_dict()) == given
    config = tiny.config()
    assert TransformerConfig.from_dict(config.to_dict()) == config


def test_values_from_python_are_checked_the_same() -> None:
    with pytest.raises(ConfigError, match="inner: size is True, expected a whole number"):
        Inner(size=True)
    with pytest.raises(ConfigError, match="outer: first is 1, expected an object; flag is 0, expected true or false"):
        Outer(first=1, flag=0)  # type: ignore[arg-type]


# ---- bounds, mappings and what is read of earlier versions


@pytest.mark.parametrize(
    ("values", "problems"),
    [
        ({"rows": 0}, ("rows is 0, expected 1 to 64",)),
        ({"rows": 65, "share": 0}, ("rows is 65, expected 1 to 64", "share is 0, expected above 0 and below 1")),
        ({"ids": (3, -1)}, ("ids has -1, expected 0 or more",)),
        ({"words": ((1,), (2, -3))}, ("words has -3, expected 0 or more",)),
        ({"threads": 0}, ("threads is 0, expected 1 or more",)),
        ({"sums": {"a": "0" * 63}}, (f"sums.a is {'0' * 63!r}, expected 64 hexadecimal digits",)),
        ({"rows": 13, "ids": (-1,)}, ("ids has -1, expected 0 or more", "rows is 13, expected luck")),
        ({"rows": "1", "ids": (-1,)}, ("rows is '1', expected a whole number",)),
    ],
)
def test_bounds_are_checked_all_at_once(values: dict[str, Any], problems: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        Sized(**values)
    assert (caught.value.subject, caught.value.problems) == ("sized", problems)
    with pytest.raises(ConfigError) as caught:
        Sized.from_dict(json.loads(json.dumps(values)), subject="f.json")
    assert (caught.value.subject, caught.value.problems) == ("f.json", problems)


def test_values_within_bounds_are_written_and_read() -> None:
    one = Sized(rows=64, share=0.5, ids=(0,), words=((), (7,)), threads=2, sums={"a": "0" * 64},
                parts={"b": Inner(size=1)}, rest={"c": [1, None]}, several=(Inner(size=2),))  # fmt: skip
    assert Sized.from_dict(json.loads(json.dumps(one.to_dict()))) == one


def test_problems_of_mappings_and_lists_name_their_place() -> None:
    data = {"parts": {"a": {"size": 0}, "b": 3, "c": {}}, "several": [{"size": "x"}], "sums": 3, "rest": 1}
    with pytest.raises(ConfigError) as caught:
        Sized.from_dict(data)
    assert caught.value.problems == (
        "sums is 3, expected an object",
        "parts.a: size is 0, expected 1 or more",
        "parts.b is 3, expected an object",
        "missing key parts.c.size",
        "rest is 1, expected an object or null",
        "several[0].size is 'x', expected a whole number",
    )


def test_objects_of_earlier_versions_are_upgraded_wherever_they_are() -> None:
    assert Sized.from_dict({"lines": 3}).rows == 3
    assert read_as(Mapping[str, Sized], {"a": {"lines": 3}}, subject="f.json") == {"a": Sized(rows=3)}


def test_a_setting_describes_its_field() -> None:
    rows, share, *_ = settings(Sized)
    assert (rows.name, rows.types, rows.default, rows.help) == ("rows", (int,), 8, "Rows of a batch.")
    assert rows.bounds == (Ge(1), Le(64))
    assert (share.types, share.bounds) == ((float, type(None)), (Gt(0), Lt(1)))


def test_a_configuration_is_frozen_and_compared_by_value() -> None:
    one = Outer(first=Inner(size=1), words=("a", "b"))
    assert {one, pickle.loads(pickle.dumps(one))} == {one}
    assert dataclasses.replace(one, share=0.25) != one
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.share = 0.25  # type: ignore[misc]
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        Outer(first=Inner(size=1), colour="red")  # type: ignore[call-arg]
