"""Run one part of the acceptance in this process: python -m gpu.parts PART FOLDER FILE writes its checks to FILE."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path

from gpu.job import Job
from gpu.latency import compile_latency, eager_latency, latency, ort_latency
from gpu.parity import comparator, dates, ort_cuda, ort_presets, presets, rtx_accepts, sessions, weights
from gpu.refusals import refusals
from tfexport.trt.config import Target

TARGETS: tuple[Target, ...] = ("tensorrt", "tensorrt-rtx")
FUNCTIONS: dict[str, Callable[[Job], None]] = {
    "rtx-accepts": rtx_accepts,
    "ort-cuda": ort_cuda,
    "ort-latency": ort_latency,
    "ort-presets": ort_presets,
    "eager-latency": eager_latency,
    "compile-latency": compile_latency,
    **{
        f"{target}-{function.__name__}": functools.partial(function, target=target)
        for target in TARGETS
        for function in (dates, latency, sessions, refusals, weights, presets, comparator)
    },
}

if __name__ == "__main__":
    part, work, found = sys.argv[1:]
    FUNCTIONS[part](Job(Path(work), Path(found)))
