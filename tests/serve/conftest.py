"""Bundles for the tests of serving."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tfexport.export import export_bundle
from tfexport.graph.config import ExportConfig
from tfexport.model import Model, load


@pytest.fixture(scope="session")
def random_bundle(once: Callable[[str, Callable[[Path], object]], Path]) -> Path:
    """Export a model of random weights that ends texts late, without a tokenizer; not to be changed."""
    config = ExportConfig(forms=("contrib",))
    return once("random", lambda path: export_bundle("preset:tiny", path, config, verify=False))


@pytest.fixture(scope="session")
def model(dates_bundle: Path) -> Model:
    """Load models/dates on the CPU."""
    return load(dates_bundle, threads=1)


@pytest.fixture(scope="session")
def texts(model: Model) -> list[str]:
    """Return the recorded texts of models/dates."""
    assert model.tokenizer
    return [sample.text for sample in model.tokenizer.text.samples]
