"""Open graphs on the stub GPU, take steps, and print where nodes went and what a step cost."""

from __future__ import annotations

import ctypes
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from tests.runtime.ort.cuda_stub.build import CORE, NAMES
from tfexport.bundle.bundle import open_bundle
from tfexport.contract import Device, Variant
from tfexport.runtime.ort._providers import CUDA
from tfexport.runtime.ort.backend import OrtSession
from tfexport.runtime.registry import Graphs
from tfexport.runtime.sources import pad_sources

SOURCE_LENGTH = 8
# The first steps reserve memory and look at weights once.
WARM_UP = 2


def main(folder: Path, variant: Variant, device: Device) -> dict[str, Any]:
    """Return operators on the CPU for each graph, with their number, and the counts of one step of one row."""
    bundle = Graphs.of(open_bundle(folder, weights=False))
    session = OrtSession(bundle, variant, 1, device)
    graphs = session._graphs
    assert graphs.encoder is not None and graphs.decoder is not None and graphs.gather is not None  # noqa: PT018
    on_cpu = {
        "encoder": operators_on_cpu(graphs.encoder),
        "decoder": operators_on_cpu(graphs.decoder),
        "reorder": operators_on_cpu(graphs.gather._graph),
    }
    batch = session.batch()
    source = np.full((1, SOURCE_LENGTH), 3)
    batch.add(pad_sources(session.spec.source, source.tolist()), [[1]])
    for _ in range(WARM_UP):
        batch.step(np.array([1]), 1)
    before = read_counts()
    batch.step(np.array([1]), 1)
    after = read_counts()
    return {"on_cpu": on_cpu, "step": {name: after[name] - before[name] for name in NAMES}}


def operators_on_cpu(session: ort.InferenceSession) -> dict[str, int]:
    """Count the nodes that do not run on CUDA, by operator."""
    parts = session.get_provider_graph_assignment_info()
    return Counter(node.op_type for part in parts if part.ep_name != CUDA.ort_name for node in part.get_nodes())


def read_counts() -> dict[str, int]:
    """Read what the stubs have counted."""
    counts = (ctypes.c_long * len(NAMES))()
    ctypes.CDLL(CORE).stub_read(counts)
    return dict(zip(NAMES, counts, strict=True))


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])))  # type: ignore[arg-type]
