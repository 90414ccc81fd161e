"""A bundle with a planted overflow."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Once


@pytest.fixture(scope="session")
def inner(once: Once) -> Path:
    """Export a model in fp16 that overflows between two products; only engines may be added."""
    from tests.debug.planted import exported

    def make(path: Path) -> None:
        path.mkdir()
        exported(path, "inner")

    return once("planted-inner", make) / "bundle"
