"""Describe the machine of a measurement: processor, versions and memory."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tfexport.runtime.cpu import instruction_sets
from tfexport.runtime.probes import describe_int8

_LIBRARIES = ("tfexport", "numpy", "tokenizers", "onnxruntime", "onnxruntime-gpu", "torch", "tensorrt", "tensorrt-rtx")


def environment(threads: int) -> dict[str, Any]:
    """Return machine, library versions and date; `threads` run the decoder."""
    versions = {}
    for name in _LIBRARIES:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": _cpu(),
        "instruction_sets": instruction_sets(),
        "int8_products": describe_int8() if find_spec("onnxruntime") else None,
        "cores": os.cpu_count() or 1,
        "threads": threads,
        "python": platform.python_version(),
        "versions": versions,
    }


def peak_memory_bytes() -> int:
    """Return the peak resident memory of this process."""
    if sys.platform == "linux":
        # getrusage would return the peak of the parent process if that was higher.
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        line = next(line for line in lines if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    elif sys.platform == "win32":  # noqa: RET505 - mypy skips the branches of other systems
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    else:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS


def _cpu() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()
