"""The closed loop: one call of the decoder after the other, the next when the last has returned."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle

from tfexport.bench.config import MAX_REQUESTS
from tfexport.bench.samples import Call, Samples

Source = Sequence[int]
MakeCall = Callable[[Sequence[Source]], Call]
Clock = Callable[[], float]

WINDOWS = 10
MIN_WINDOWS = 3


def closed_loop(
    call: MakeCall, batches: Sequence[Sequence[Source]], seconds: float, *, clock: Clock = time.perf_counter
) -> Samples:
    """Make one call after the other, the next as soon as the last has returned.

    Args:
        call: decodes one batch.
        batches: taken in turn.
        seconds: how long; at least three windows of a tenth of it are measured, each of whole calls.
        clock: seconds.

    Returns:
        One request a call; the windows are tokens a second.
    """
    samples, pool = Samples(), cycle(batches)
    began = clock()
    while len(samples.windows) < MIN_WINDOWS or (clock() - began < seconds and samples.calls < MAX_REQUESTS):
        samples.windows.append(_window(call, pool, samples, seconds / WINDOWS, clock))
    samples.elapsed_s = clock() - began
    return samples


def _window(call: MakeCall, pool: Iterator[Sequence[Source]], samples: Samples, seconds: float, clock: Clock) -> float:
    began, tokens = clock(), samples.tokens
    while True:
        samples.add(call(next(pool)))
        elapsed = clock() - began
        if elapsed >= seconds:
            return (samples.tokens - tokens) / elapsed
