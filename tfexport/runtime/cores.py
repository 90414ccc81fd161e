"""What the CPU offers: the cores that this process may use, and its instruction sets."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import cast

_ROOT = Path("/")
# More than any machine has cores; each costs memory, and more than the system allows end the process.
MAX_THREADS = 1024


def available_cores(root: Path = _ROOT) -> int:
    """Count the cores that this process may run on, within the limit of its container.

    Two hyperthreads of a core count once, for they share its arithmetic. A quota (`docker --cpus`, `limits.cpu` of
    Kubernetes) is rounded down: threads that wait awake count in it, and a process above it is stopped for a while.

    Args:
        root: of the file system, for tests.
    """
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    cores = len({_core(root, cpu) for cpu in os.sched_getaffinity(0)})
    return max(1, int(min([cores, *_quotas(root)])))


def instruction_sets() -> list[str]:
    """Name the CPU's vector instruction sets as NumPy does, such as X86_V3 (AVX2) or AVX512_ICL (with VNNI)."""
    import numpy as np

    extensions = cast("dict[str, dict[str, list[str]]]", np.show_config(mode="dicts"))["SIMD Extensions"]
    return [*extensions["baseline"], *extensions.get("found", [])]


def _core(root: Path, cpu: int) -> str:
    """Return what hyperthreads of one core have in common."""
    return _read(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or str(cpu)


def _quotas(root: Path) -> Iterator[float]:
    """Find the limits of the process's control groups and of those around them, in cores."""
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
            if quota.isdecimal() and period.isdecimal() and int(period):  # "max" and -1 are none
                yield int(quota) / int(period)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
