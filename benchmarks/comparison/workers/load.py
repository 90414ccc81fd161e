"""Load on a decoder: requests that are all there at once, or arrive on a schedule, and how they are put together.

Standard library alone, since every system's environment runs it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

Ids = list[int]
Decode = Callable[[list[Ids]], list[Ids]]
# Callers that make one call for each request, and what a window collects, for how long.
CLIENTS, WINDOW_S, WINDOW_SIZE = 8, 0.005, 32
POLICIES = ("threads", "window")


class Ledger:
    """When requests were there and when they were answered; whoever is late gives up."""

    def __init__(self, arrivals: Sequence[float] | None, count: int, limit_s: float) -> None:
        """Begin the clocks of all requests, which are there at once where there are no arrivals."""
        self.arrivals = arrivals or [0.0] * count
        self.ended: list[float | None] = [None] * count
        self.outputs: list[Ids] = [[] for _ in range(count)]
        self._cpu, self.began = time.process_time(), time.perf_counter()
        self._until = self.began + self.arrivals[-1] + limit_s

    @property
    def is_over(self) -> bool:
        """Whether it is too late for all that is left."""
        return time.perf_counter() > self._until

    def wait_for(self, number: int) -> float:
        """Return the seconds until a request is there."""
        return self.began + self.arrivals[number] - time.perf_counter()

    def note(self, number: int, output: Ids) -> None:
        """Note an answer."""
        self.ended[number], self.outputs[number] = time.perf_counter() - self.began, output

    def close(self) -> dict[str, Any]:
        """Return wall and CPU seconds, latencies from the arrival, null for those not answered, and outputs."""
        return {
            "wall_s": time.perf_counter() - self.began,
            "cpu_s": time.process_time() - self._cpu,
            "latencies_s": [
                None if end is None else end - arrival for end, arrival in zip(self.ended, self.arrivals, strict=True)
            ],
            "outputs": self.outputs,
        }


def run(policy: str, decode: Decode, sources: Sequence[Ids], ledger: Ledger) -> dict[str, Any]:
    """Answer all requests.

    Args:
        policy: "threads" for callers of their own, each with a call for each request; "window" for one call for all
            that arrive within 5 ms of the first, 32 at most.
        decode: decodes a batch; called from several threads.
        sources: of the requests.
        ledger: of the same number of requests, just begun.
    """
    arrived: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    serve, num_threads = (_one_by_one, CLIENTS) if policy == "threads" else (_windows, 1)
    threads = [threading.Thread(target=serve, args=(decode, sources, arrived, ledger)) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for number in range(len(sources)):
        if (early := ledger.wait_for(number)) > 0:
            time.sleep(early)
        arrived.put(number)
    for _ in threads:
        arrived.put(None)
    for thread in threads:
        thread.join()
    return ledger.close()


def _one_by_one(decode: Decode, sources: Sequence[Ids], arrived: Any, ledger: Ledger) -> None:
    while (number := arrived.get()) is not None:
        if not ledger.is_over:
            ledger.note(number, decode([sources[number]])[0])


def _windows(decode: Decode, sources: Sequence[Ids], arrived: Any, ledger: Ledger) -> None:
    is_open = True
    while is_open and (first := arrived.get()) is not None:
        numbers, until = [first], time.perf_counter() + WINDOW_S
        while len(numbers) < WINDOW_SIZE:
            try:
                number = arrived.get(timeout=max(0.0, until - time.perf_counter()))
            except queue.Empty:
                break
            if number is None:
                is_open = False
                break
            numbers.append(number)
        if not ledger.is_over:
            for number, output in zip(numbers, decode([sources[number] for number in numbers]), strict=True):
                ledger.note(number, output)
