"""Equal logits on a device: sorted by id, whatever order its selection has."""

from __future__ import annotations

import numpy as np
import pytest

from tests import tiny
from tests.gpu.job import Job
from tests.runtime.exported import sources
from tests.runtime.planted import planted, ranked

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]
# Below and above the sizes that ONNX Runtime's radix selection is taken for.
VOCABULARIES = (100, 600, 8_000, 32_000)
COUNTS = (1, 8, 64, 100)


def ties(job: Job) -> None:
    """Both forms in ONNX Runtime CUDA, with a few values for all logits."""
    from tfexport.export.write import write_graphs
    from tfexport.nn.config import model_spec
    from tfexport.runtime.ort.backend import OrtSession
    from tfexport.runtime.registry import Graphs

    for vocab in VOCABULARIES:
        model, row = planted(vocab, levels=5)
        spec, folder = model_spec(model.config, "fp32"), job.work / f"ties-{vocab}"
        folder.mkdir(parents=True, exist_ok=True)
        write_graphs(model, spec, folder, forms=("concat", "static"), opset=18, report=print)
        graphs = {path.stem: path for path in folder.glob("*.onnx")}
        for form in ("concat", "static"):
            with job.check(f"{form}, {vocab} tokens") as numbers:
                batch = OrtSession(Graphs(graphs, spec), form, device="cuda").batch()
                batch.add(*sources(tiny.config()), [[1]] * 4)
                numbers["last ties as on the CPU"] = ", ".join(
                    str(count) for count in COUNTS if is_ranked(batch.step(np.ones(4, np.int64), count), row, count)
                )


def is_ranked(found, row: np.ndarray, count: int) -> bool:
    """Check what is promised of candidates, and say whether those that tie for the last place are the CPU's too."""
    expected = ranked(row)[:count]
    for ids, logits in zip(found.token_ids, found.logits, strict=True):
        np.testing.assert_array_equal(logits, row[expected])
        np.testing.assert_array_equal(row[ids], logits)
        above = logits > logits[-1]
        np.testing.assert_array_equal(ids[above], expected[above])
        assert (np.diff(ids[~above]) > 0).all(), "equal logits are not in order of id"
    return bool((found.token_ids == expected).all())


def test_ties(gpu_job: Job) -> None:
    ties(gpu_job)
