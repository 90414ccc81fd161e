"""Several sessions and threads over one engine."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.gpu.decodes import hypotheses
from tests.gpu.job import Job
from tfexport.bundle.bundle import open_bundle
from tfexport.tensorrt.config import Target

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]
TARGETS: tuple[Target, ...] = ("tensorrt", "tensorrt-rtx")


def sessions(job: Job, target: Target) -> None:
    """Two sessions over one loaded engine, from eight threads: everybody gets what one alone gets."""
    from tfexport.tensorrt.cuda import Cuda
    from tfexport.tensorrt.session.session import TrtSession
    from tfexport.tensorrt.store import load_engine

    bundle = open_bundle(job.bundle("dates"))
    name = job.engine(bundle.path, target, "static", "fp32")
    if name is None:
        return
    with job.check("two sessions, eight threads") as numbers:
        engine, cuda = load_engine(bundle, name), Cuda()
        limits = engine.manifest.limits
        opened = [
            TrtSession(engine.plans, bundle.manifest.spec, "static", limits, engine.library, cuda) for _ in range(2)
        ]
        together(opened)
        numbers["device MiB"] = ", ".join(str(session.memory_bytes() // 2**20) for session in opened)
        for session in opened:
            session.close()


def together(opened: Sequence[Any]) -> None:
    """Decode with several sessions alone and from eight threads at once; fail unless the tokens are the same."""
    tasks = [(session, batch, beams) for session in opened for batch in (1, 3, 8) for beams in (1, 4)]
    alone = [hypotheses(*task) for task in tasks]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda task: hypotheses(*task), tasks * 3))
    assert found == alone * 3, "threads get other tokens than one alone"


@pytest.mark.parametrize("target", TARGETS)
def test_sessions(gpu_job: Job, target: Target) -> None:
    sessions(gpu_job, target)
