"""What the times were measured on: processor, versions, memory and its bandwidth."""

from __future__ import annotations

import os
import platform
import resource
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tfexport.bench.timing import Effort, repeat, stopwatch
from tfexport.runtime.cpu import instruction_sets
from tfexport.runtime.probes import describe_int8

_LIBRARIES = ("tfexport", "numpy", "tokenizers", "onnxruntime", "onnxruntime-gpu", "torch", "tensorrt", "tensorrt-rtx")
_ROUNDS = 5
# Each thread reads its part again and again until it has read so much, so that starting it costs nothing.
_READ_BYTES = 400_000_000
# Less is read so quickly that the call takes longer.
_LEAST_BYTES = 1_000_000


def environment(threads: int) -> dict[str, Any]:
    """Say where and when this is running, as JSON values.

    Args:
        threads: that take a step.
    """
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": _cpu(),
        "instruction_sets": instruction_sets(),
        "int8_products": describe_int8() if find_spec("onnxruntime") else None,
        "cores": os.cpu_count() or 1,
        "threads": threads,
        "python": platform.python_version(),
        "versions": {name: found for name in _LIBRARIES if (found := _version(name))},
    }


def peak_memory_bytes() -> int:
    """Return the most memory that this process has held."""
    status = Path("/proc/self/status")
    if status.exists():
        # On Linux getrusage would tell the peak of whoever started this process, when that was higher.
        line = next(line for line in status.read_text(encoding="ascii").splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS


def memory_bandwidth(num_bytes: int, threads: int) -> float:
    """Measure how fast as many threads together read memory as take a step.

    Args:
        num_bytes: of the memory that is read over and over; as much as a step reads, so that it lies in the same
            caches; at least 1 MB is read.
        threads: that read.

    Returns:
        Bytes a second, the best of several rounds and of two ways to read.
    """
    memory = np.ones(max(num_bytes, _LEAST_BYTES) // 4, np.float32)
    parts, repeats = np.array_split(memory, threads), max(1, _READ_BYTES // memory.nbytes)
    with ThreadPoolExecutor(len(parts)) as pool:
        return max(_bytes_per_second(pool, parts, read, repeats) for read in (_largest, _squares))


def _bytes_per_second(
    pool: ThreadPoolExecutor,
    parts: list[NDArray[np.float32]],
    read: Callable[[NDArray[np.float32]], object],
    times: int,
) -> float:
    def work(part: NDArray[np.float32]) -> None:
        for _ in range(times):
            read(part)

    seconds = repeat(stopwatch(lambda: list(pool.map(work, parts))), Effort(warm_up=0, least_runs=_ROUNDS))
    return times * sum(part.nbytes for part in parts) / min(seconds)


def _largest(part: NDArray[np.float32]) -> object:
    return part.max(initial=0)


def _squares(part: NDArray[np.float32]) -> object:
    return part @ part


def _cpu() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
