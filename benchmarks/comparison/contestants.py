"""Ways to answer many callers with the same weights: who loads what, and puts requests together how."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from comparison.processes import Worker
from comparison.systems import OURS, Variant
from comparison.weights import ConvertedWeights

PEER = "ctranslate2"
MODULES = {OURS: "comparison.workers.loaded_ours", PEER: "comparison.workers.loaded_translator"}
# Requests that came so much later than the bound end a run: it is lost anyway.
LIMIT = 3.0


@dataclass(frozen=True)
class Contestant:
    """A system that answers requests in one way.

    Attributes:
        system: ours or the peer.
        precision: "fp32" or "int8".
        policy: "threads", "window" or "slots".
    """

    system: str
    precision: str
    policy: str

    def __str__(self) -> str:
        """Name it in one line."""
        how = {"threads": "one call a thread", "window": "5 ms window", "slots": "engine"}[self.policy]
        return f"{self.system} {self.precision}, {how}"


FP32 = (
    Contestant(OURS, "fp32", "slots"),
    Contestant(OURS, "fp32", "window"),
    Contestant(OURS, "fp32", "threads"),
    Contestant(PEER, "fp32", "threads"),
)
INT8 = (Contestant(OURS, "int8", "slots"), Contestant(PEER, "int8", "window"))
EQUAL = FP32[:2]


@dataclass(frozen=True)
class Run:
    """What came of one run.

    Attributes:
        requests: that there were.
        wall_s: until the last answer.
        cpu_s: of all threads of the process.
        p99_s: of the latencies; infinite where more than one in a hundred was not answered.
        outputs: token ids of each text, without its end.
    """

    requests: int
    wall_s: float
    cpu_s: float
    p99_s: float
    outputs: list[list[int]]

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values, without the outputs."""
        p99_s = self.p99_s if math.isfinite(self.p99_s) else None
        return {"requests": self.requests, "wall_s": self.wall_s, "cpu_s": self.cpu_s, "p99_s": p99_s}


class Processes:
    """Loaded systems by precision and threads, each in a process and an environment of its own."""

    def __init__(self, weights: ConvertedWeights, model: str) -> None:
        """Begin empty."""
        self.versions: dict[str, str] = {}
        self._weights, self._model = weights, model
        self._workers: dict[tuple[str, str, int], Worker] = {}

    def worker(self, system: str, precision: str, threads: int) -> Worker:
        """Return the process; the first time, start it and load the model.

        Raises:
            BenchError: it has no environment, its weights could not be made, or it died.
        """
        key = system, precision, threads
        if key not in self._workers:
            aim = "throughput" if system == OURS and precision != "fp32" else None
            variant = Variant(system=system, precision=precision, optimize_for=aim)
            folder = self._weights.prepared(self._model, variant)
            worker = Worker(f"{variant}, {threads} threads", self._weights.python(variant), MODULES[system])
            self._workers[key] = worker
            self.versions |= worker.ask("load", folder=str(folder.resolve()), precision=precision, threads=threads)[
                "versions"
            ]
        return self._workers[key]

    def run(
        self,
        contestant: Contestant,
        threads: int,
        sources: Sequence[Sequence[int]],
        arrivals: Sequence[float] | None = None,
        bound_s: float = math.inf,
    ) -> Run:
        """Let a contestant answer requests, all at once or on a schedule."""
        limit_s = LIMIT * bound_s if math.isfinite(bound_s) else 86_400.0
        worker = self.worker(contestant.system, contestant.precision, threads)
        found = worker.ask("answer", policy=contestant.policy, sources=sources, arrivals=arrivals, limit_s=limit_s)
        latencies = [math.inf if one is None else one for one in found["latencies_s"]]
        p99_s = float(np.quantile(latencies, 0.99, method="higher"))
        return Run(len(sources), found["wall_s"], found["cpu_s"], p99_s, found["outputs"])

    def close(self) -> None:
        """End all processes."""
        while self._workers:
            self._workers.popitem()[1].close()


def poisson(rate: float, count: int, seed: int) -> list[float]:
    """Draw when requests arrive; schedules of one seed differ in their pace alone."""
    draw, now, found = random.Random(seed), 0.0, []
    for _ in range(count):
        now += draw.expovariate(rate)
        found.append(now)
    return found
