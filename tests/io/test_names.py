"""Paths from callers: what no file system takes is one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tfexport._io.names import checked_path
from tfexport.errors import ConfigError


def test_a_path_is_returned_even_if_nothing_exists(tmp_path: Path) -> None:
    assert checked_path("a/b", "path") == Path("a/b")
    assert checked_path(tmp_path, "path") is not None


@pytest.mark.parametrize("value", [None, 5, True, b"bytes", ["a"], 1.5])
def test_a_value_that_is_not_a_path_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"^output is .*, expected a path as text$"):
        checked_path(value, "output")


class Bytes:
    def __fspath__(self) -> bytes:
        return b"a"


@pytest.mark.parametrize(
    ("value", "why"), [("a\0b", "null character"), ("caf\udce9", "not valid UTF-8"), (Bytes(), "expected a path")]
)
def test_characters_not_allowed_in_paths_are_refused(value: object, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        checked_path(value, "path")
