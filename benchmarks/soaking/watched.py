"""What a process holds: memory, threads, descriptors, temporary files. Linux alone."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tfexport.errors import BenchError


@dataclass(frozen=True)
class Sample:
    """What a process held at a time.

    Attributes:
        at_s: since the soak began.
        rss_mb: resident memory, in 10^6 bytes.
        anonymous_mb: of it what is no file's; the system takes pages of files back as it likes.
        threads: of it.
        descriptors: open ones.
        temporary_files: in its folder for them.
    """

    at_s: float
    rss_mb: float
    anonymous_mb: float
    threads: int
    descriptors: int
    temporary_files: int


def sample(pid: int, temporary: Path, at_s: float) -> Sample:
    """Look at a process.

    Raises:
        BenchError: it has ended.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
        descriptors = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    except OSError as error:
        raise BenchError(f"process {pid}: has ended ({error.strerror})") from error
    fields = dict(re.findall(r"^(\w+):\s+(\d+)", status, re.MULTILINE))
    if "VmRSS" not in fields:
        raise BenchError(f"process {pid}: has ended")
    files = sum(len(names) for _, _, names in os.walk(temporary))
    rss_mb, anonymous_mb = (int(fields[name]) * 1024 / 1e6 for name in ("VmRSS", "RssAnon"))
    return Sample(at_s, rss_mb, anonymous_mb, int(fields["Threads"]), descriptors, files)


def mb_an_hour(samples: Sequence[Sample], name: str = "rss_mb") -> float:
    """Return the slope of the line through resident memory, or through `name`, that has the least squares."""
    hours = [one.at_s / 3600 for one in samples]
    return float(np.polyfit(hours, [getattr(one, name) for one in samples], 1)[0])
