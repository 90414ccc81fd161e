"""Leave PyTorch its threads: the tests on a GPU run by themselves, on models that are not tiny."""

import pytest


@pytest.fixture(autouse=True, scope="session")
def _one_thread_per_worker() -> None:
    """Override the fixture of all other tests."""
