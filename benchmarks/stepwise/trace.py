"""How long the device works in a step, and how often it is given something, from a trace of PyTorch's profiler.

On a GPU the profiler sees kernels, copies and fills of every library in the process. On the CPU it sees operators of
PyTorch alone.
"""

from __future__ import annotations

from collections.abc import Iterable

from stepwise.cells import Device
from stepwise.steps import begin
from tfexport.bench.timing import clock
from tfexport.runtime.session import Session

Span = tuple[float, float]


def traced(session: Session, size: int, device: Device) -> dict[str, float] | None:
    """Decode a batch in a trace.

    Returns:
        Of a step `busy_ms`, in which something ran on the device, `traced_ms`, wall time under the profiler, and
        `given`, things that the device was given; None where the profiler saw nothing.
    """
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    begun = begin(session, size)
    steps = begun.left
    activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiled:
        seconds, _ = clock(begun.run)
        if device == "cuda":
            torch.cuda.synchronize()
    wanted = DeviceType.CUDA if device == "cuda" else DeviceType.CPU
    spans = [
        (event.time_range.start, event.time_range.end) for event in profiled.events() if event.device_type == wanted
    ]
    if not spans:
        return None
    busy_ms, traced_ms = covered(spans) / 1000, 1000 * seconds
    return {"busy_ms": busy_ms / steps, "traced_ms": traced_ms / steps, "given": len(spans) / steps}


def covered(spans: Iterable[Span]) -> float:
    """Return the length of what spans cover together; where they overlap it counts once."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
