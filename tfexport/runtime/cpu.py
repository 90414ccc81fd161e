"""The CPU: the cores that this process may use, its instruction sets, and the threads that a bundle runs with."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal, cast

from tfexport._arguments import is_whole
from tfexport.bundle.bundle import Bundle
from tfexport.bundle.step_weights import step_weight_bytes
from tfexport.contract import QUANTIZED_WEIGHTS, WEIGHTS

_ROOT = Path("/")
# More than any machine has cores; each thread costs memory, and more than the system allows end the process.
MAX_THREADS = 1024
# A decoder that reads fewer bytes of weights per step takes one thread: ONNX Runtime gives each of its small products
# to one thread anyway, and the others would wait awake. docs/generation.md has the measurements.
ONE_THREAD_BELOW = 8 * 2**20


@dataclass(frozen=True)
class Threads:
    """CPU threads of one call.

    Attributes:
        encoder: threads that encode sources and align.
        decoder: threads of the decoder's steps.
    """

    encoder: int
    decoder: int


def choose_threads(threads: int | Literal["auto"] | None, bundle: Bundle) -> Threads | None:
    """Return the threads for a bundle.

    Args:
        threads: for both graphs. "auto" gives the encoder all available cores, because its products are large and its
            threads sleep between runs, and the decoder all or one. None lets ONNX Runtime choose: one on each core
            that it finds.
        bundle: to run.
    """
    if threads is None:
        return None
    if is_whole(threads):
        return Threads(int(threads), int(threads))
    cores = available_cores()
    is_small = bundle.manifest.spec.has_decoder and _step_bytes(bundle) < ONE_THREAD_BELOW
    return Threads(cores, 1 if is_small else cores)


def _step_bytes(bundle: Bundle) -> int:
    """Return the weights that a step reads; for a module of the user's own all weights, the encoder's too."""
    known = step_weight_bytes(bundle)
    files = bundle.manifest.files
    return sum(files[name].bytes for name in (WEIGHTS, QUANTIZED_WEIGHTS) if name in files) if known is None else known


def available_cores(root: Path = _ROOT) -> int:
    """Count the cores that this process may run on, within the limit of its container.

    Two hyperthreads of a core count once, because they share its arithmetic. A quota (`docker --cpus`, `limits.cpu` of
    Kubernetes) is rounded down: waiting threads count in it, and a process above it is stopped for a while.

    Args:
        root: of the file system, for tests.
    """
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    siblings = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    cores = len({_read(root / siblings.format(cpu)) or str(cpu) for cpu in os.sched_getaffinity(0)})
    return max(1, int(min([cores, *_quotas(root)])))


def instruction_sets() -> list[str]:
    """Name the CPU's vector instruction sets as NumPy does, such as X86_V3 (AVX2) or AVX512_ICL (with VNNI)."""
    import numpy as np

    extensions = cast("dict[str, dict[str, list[str]]]", np.show_config(mode="dicts"))["SIMD Extensions"]
    return [*extensions["baseline"], *extensions.get("found", [])]


def _quotas(root: Path) -> Iterator[float]:
    """Yield the limits of the process's control groups and their parents, in cores."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        own = PurePosixPath(path.lstrip("/"))
        for group in (own, *own.parents):
            if not controllers:
                quota, _, period = _read(root / "sys/fs/cgroup" / group / "cpu.max").partition(" ")
            elif "cpu" in controllers.split(","):
                folder = root / "sys/fs/cgroup/cpu" / group
                quota, period = (_read(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
            else:
                break
            if quota.isdecimal() and period.isdecimal() and int(period):  # "max" and -1 set no limit
                yield int(quota) / int(period)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
