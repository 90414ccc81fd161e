"""Run every part of the acceptance on a GPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.gpu.job import Job
from tests.gpu.parts import FOUND, PARTS, WORK, Part, skipped


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("part", PARTS, ids=[part.name for part in PARTS])
def test_part(part: Part, tmp_path_factory: pytest.TempPathFactory) -> None:
    if reason := skipped(part):
        pytest.skip(reason)
    base = tmp_path_factory.getbasetemp()
    job = Job(Path(os.environ.get(WORK, base / "gpu")), Path(os.environ.get(FOUND, base / f"{part.name}.jsonl")))
    part.run(job)
    assert not job.failed, "; ".join(job.failed)
