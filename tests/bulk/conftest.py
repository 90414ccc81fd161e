"""A model for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import tfexport


@pytest.fixture(scope="session")
def model(dates_bundle: Path) -> Iterator[tfexport.Model]:
    with tfexport.load(dates_bundle) as model:
        yield model
