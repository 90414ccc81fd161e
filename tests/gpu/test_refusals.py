"""Refusals: every damage and every request that is too large is one line."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.gpu import decodes
from tests.gpu.job import Job
from tfexport.bundle.bundle import open_bundle
from tfexport.bundle.manifest import ENGINES
from tfexport.errors import EngineError, InputError
from tfexport.tensorrt.config import Target

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]
TARGETS: tuple[Target, ...] = ("tensorrt", "tensorrt-rtx")


def refusals(job: Job, target: Target) -> None:
    """Engines that are damaged or belong elsewhere, then requests beyond a profile."""
    from tfexport.tensorrt.store import load_engine

    original = job.bundle("dates")
    name = job.engine(original, target, "static", "fp32")
    if name is None:
        return

    def refused(what: str, change: Callable[[Path], None]) -> None:
        bundle = job.copy("refusals", original, engines=True)
        with job.check(what) as numbers:
            change(bundle / ENGINES / name)
            numbers["words"] = raised(lambda: load_engine(open_bundle(bundle), name), EngineError)

    refused("a flipped byte", lambda engine: flip(engine / "encoder.plan"))
    refused("a truncated plan", lambda engine: os.truncate(engine / "encoder.plan", 1000))
    refused("a missing plan", lambda engine: (engine / "encoder.plan").unlink())
    with job.check("an engine of another bundle") as numbers:
        foreign = job.copy("foreign", job.bundle("tiny"), engines=False)
        shutil.copytree(original / ENGINES / name, foreign / ENGINES / name)
        numbers["words"] = raised(lambda: load_engine(open_bundle(foreign), name), EngineError)
    with job.check("requests that are too large") as numbers:
        session = decodes.open_engine(original, name)
        for what, shape in (
            ("sources", (session.limits.rows.most + 1, 3)),
            ("tokens", (1, session.spec.max_source_length + 1)),
        ):
            ids, mask = np.full(shape, 5), np.ones(shape, np.bool_)
            prompts = [[session.spec.tokens.start]] * shape[0]
            numbers[what] = raised(functools.partial(session.batch().add, ids, mask, prompts), InputError)
        session.close()


def raised(call: Callable[[], object], kind: type[Exception]) -> str:
    """Return the words of the error that a call must raise, one line."""
    try:
        call()
    except kind as error:
        words = str(error)
        if "\n" in words:
            raise AssertionError(f"more than one line: {words!r}") from error
        return words
    raise AssertionError("nothing was refused")


def flip(path: Path) -> None:
    """Change one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("target", TARGETS)
def test_refusals(gpu_job: Job, target: Target) -> None:
    refusals(gpu_job, target)
