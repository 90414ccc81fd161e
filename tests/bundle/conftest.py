"""The bundle that the tests of bundles begin with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bundle.made import make


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    make(tmp_path / "bundle")
    return tmp_path / "bundle"
