"""Measure the bandwidth of the GPU, and replays of kernels, top-k and small copies."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable

import torch

from tests.gpu.job import Job, Numbers

NUM_KERNELS = 134  # about as many as a static step of paper-base has in ONNX Runtime CUDA
VOCAB, ROWS, CANDIDATES = 32_000, (1, 8, 32), (1, 2, 8)
LARGE_BYTES = 1 << 30
WARM_UP, RUNS = 5, 50
Call = Callable[[], object]


def primitives(job: Job, device: str = "cuda", large_bytes: int = LARGE_BYTES) -> None:
    job.check("bandwidth", lambda numbers: numbers.update(bandwidth(device, large_bytes)))
    tiny = functools.partial(tiny_kernels, torch.zeros(1, device=device))
    job.check(f"a graph of {NUM_KERNELS} tiny kernels", lambda numbers: numbers.update(replay_us=replay_us(tiny)))
    job.check(f"top-k of {VOCAB}", functools.partial(top_k, device))
    job.check("small copies", functools.partial(small_copies, device))


def top_k(device: str, numbers: Numbers) -> None:
    for rows in ROWS:
        logits = torch.randn(rows, VOCAB, device=device)
        for k in CANDIDATES:
            numbers[f"{rows} rows, k {k}, us"] = replay_us(functools.partial(torch.topk, logits, k))


def small_copies(device: str, numbers: Numbers) -> None:
    on_host, on_device = torch.zeros(64, pin_memory=device == "cuda"), torch.zeros(64, device=device)
    for name, target, source in (("up", on_device, on_host), ("down", on_host, on_device)):
        numbers[f"{name}_us"] = replay_us(functools.partial(target.copy_, source, non_blocking=True))


def tiny_kernels(number: torch.Tensor) -> None:
    for _ in range(NUM_KERNELS):
        number.add_(1)


def bandwidth(device: str, num_bytes: int) -> dict[str, float]:
    """Return GB/s of a copy, of a sum, which only reads, and the larger."""
    numbers = torch.ones(num_bytes // 4, device=device)
    other = torch.empty_like(numbers)
    copied = 2 * num_bytes / (median_us(lambda: other.copy_(numbers)) * 1e3)
    read = num_bytes / (median_us(numbers.sum) * 1e3)
    return {"copy_gb_s": round(copied), "read_gb_s": round(read), "bandwidth_gb_s": round(max(copied, read))}


def replay_us(queue: Call) -> float:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        queue()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        queue()
    return median_us(graph.replay)


def median_us(queue: Call) -> float:
    found = []
    for run in range(WARM_UP + RUNS):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        queue()
        ended.record()
        ended.synchronize()
        if run >= WARM_UP:
            found.append(1000 * began.elapsed_time(ended))
    return round(statistics.median(found), 2)
