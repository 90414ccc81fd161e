"""docs/architecture.md cannot go stale: rooms, order, fences, seams and paths are those of the code."""

from __future__ import annotations

import ast
import inspect
import re

from tests.conftest import ROOT
from tests.test_architecture import ALLOWED, FENCES, ORDER, modules
from tests.test_docs import blocks, code, table
from tfexport.models.cache import SelfAttention
from tfexport.runtime import session

PAGE = ROOT / "docs" / "architecture.md"
FLOW, LEVELS = (block.text for block in blocks(PAGE))


def test_every_room_has_its_row() -> None:
    """To mend it: the room, and the first line of its docstring."""
    shown = {row[0].strip("`"): row[1] for row in table(PAGE, "room")}
    assert shown == {room: (ast.get_docstring(modules()[room]) or "").splitlines()[0] for room in ALLOWED if room}


def test_the_picture_of_the_flow_names_what_there_is() -> None:
    named = re.findall(r"[\w/]+\.py|\w[\w/]*/", FLOW)
    assert len(named) > 15
    homes = [ROOT, *(ROOT / "tfexport" / name for name in ("", "checkpoint", "graph"))]
    for name in named:
        assert any((home / name).exists() for home in homes), name


def test_the_levels_are_those_of_the_imports() -> None:
    assert [set(line.split()) for line in LEVELS.splitlines()] == list(ORDER)


def test_the_fences_are_those_of_the_imports() -> None:
    shown = {name: set(code(row[1])) for row in table(PAGE, "library") for name in code(row[0])}
    assert shown == FENCES


def test_the_seams_are_those_of_the_code() -> None:
    text = PAGE.read_text(encoding="utf-8")
    parameters = ", ".join(list(inspect.signature(SelfAttention.attend).parameters)[1:])
    assert f"`attend({parameters})`" in text
    methods = {name for name, value in vars(session.Batch).items() if inspect.isfunction(value) and name[0] != "_"}
    assert {row[0].strip("`") for row in table(PAGE, "method of a batch")} == methods
    for name in re.findall(r"`([A-Z]\w+)`", text):
        assert hasattr(session, name), name


def test_every_path_is_there() -> None:
    paths = re.findall(r"`((?:tfexport|models|tests|docs|scripts)/[\w./-]+)`", PAGE.read_text(encoding="utf-8"))
    assert len(paths) > 20
    assert [path for path in paths if not (ROOT / path).exists()] == []
