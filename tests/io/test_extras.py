"""What installs what: every command names what the project declares, and no other file has a command of its own."""

from __future__ import annotations

import re
import tomllib

import pytest

from tests.conftest import ROOT
from tfexport._io import extras
from tfexport._io.extras import install_command

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@pytest.mark.parametrize("module", sorted(extras._EXTRAS))
def test_a_module_comes_with_an_extra_that_brings_it(module: str) -> None:
    extra = extras._EXTRAS[module]
    assert f"pip install 'tfexport[{extra}]'" in install_command(module)
    brought = " ".join(EXTRAS[extra]).replace("-", "_")
    by = {"PIL": "pillow", "yaml": "pyyaml", "starlette": "fastapi", "pydantic": "fastapi"}
    assert by.get(module, module) in brought


def test_no_other_file_names_an_extra() -> None:
    files = (ROOT / "tfexport").rglob("*.py")
    assert [path.name for path in files if re.search(r"tfexport\[\w+\]", path.read_text())] == []
