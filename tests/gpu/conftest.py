"""What the tests on a GPU share: a folder for bundles and engines, and checks that are written down at once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpu.job import Job
from tests.gpu.parts import PARTS, skipped

WORK, FOUND = "GPU_WORK", "GPU_FOUND"


@pytest.fixture(autouse=True, scope="session")
def _one_thread_per_worker() -> None:
    """Leave torch its threads: these tests run alone, on models that are not tiny."""


@pytest.fixture
def gpu_job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """Return the job of a part; skip what this machine has no means for, and fail when one of its checks has failed."""
    node = request.node.nodeid.rpartition("/")[2]
    part = next(part for part in PARTS if part.test == node)
    if reason := skipped(part):
        pytest.skip(reason)
    base = tmp_path_factory.getbasetemp()
    work = Path(os.environ.get(WORK, base / "gpu"))
    job = Job(work, Path(os.environ.get(FOUND, base / f"{part.name}.jsonl")))
    yield job
    assert not job.failed, "; ".join(job.failed)
