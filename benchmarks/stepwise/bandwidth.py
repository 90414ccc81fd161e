"""How fast the device reads and writes its memory, measured in the process whose steps are compared with it."""

from __future__ import annotations

import statistics

from stepwise.cells import Device
from tfexport.bench.machine import memory_bandwidth
from tfexport.cores import available_cores

# Far more than a GPU's caches hold.
_COPY_BYTES = 1 << 30
_COPIES = 20


def bandwidth(device: Device, num_bytes: int) -> float:
    """Measure bytes a second: on a GPU those that a copy on it reads and writes, on the CPU those that cores read.

    Args:
        device: whose.
        num_bytes: that a step reads; on the CPU the memory that is read over and over.
    """
    if device == "cpu":
        return memory_bandwidth(num_bytes, available_cores())
    import torch

    source = torch.ones(_COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    seconds = []
    for _ in range(_COPIES):
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record()
        target.copy_(source)
        ended.record()
        torch.cuda.synchronize()
        seconds.append(began.elapsed_time(ended) / 1000)
    return 2 * _COPY_BYTES / statistics.median(seconds)
