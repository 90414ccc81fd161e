"""Whether the CPU multiplies 8 bits by 8 bits exactly."""

from __future__ import annotations

import platform
from pathlib import Path

_ROOT = Path("/")
_X86 = frozenset({"x86_64", "amd64", "i386", "i686"})
_VNNI = frozenset({"avx512_vnni", "avx_vnni"})


def multiplies_exactly(root: Path = _ROOT) -> bool:
    """Say whether products of 8 bits are added in 32: by VNNI on x86, and on every other CPU.

    x86 before VNNI adds two of them in 16 bits, where they may not fit, as
    https://onnxruntime.ai/docs/performance/model-optimizations/quantization.html says. Where nobody tells what an x86
    CPU has, it counts as one of these.

    Args:
        root: of the file system, for tests.
    """
    if platform.machine().lower() not in _X86:
        return True
    try:
        with (root / "proc/cpuinfo").open(encoding="utf-8") as lines:
            # The first core stands for all of them: their list is long, and takes the system its time.
            flags = next((line for line in lines if line.startswith("flags")), "")
    except OSError:
        return False
    return not _VNNI.isdisjoint(flags.split())
