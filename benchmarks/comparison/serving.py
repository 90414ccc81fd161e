"""Contestants beside one another: outputs, then capacity, then the highest rate that keeps a bound, in rounds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from comparison.contestants import PEER, Contestant, Processes, Run, poisson
from comparison.lengths import Text
from comparison.rounds import PAUSE_S, agreement
from comparison.systems import OURS
from tfexport.bench.timing import interleaved
from tfexport.errors import BenchError

# Quantised, a text may be a few tokens longer or shorter than its source asks for, as the report says.
TOTAL_WITHIN = 0.15
# Of the capacity: the rate that is tried first, and those that are taken to be kept and to be too much before any is.
FIRST, KEPT, TOO_MUCH = 0.75, 0.25, 1.5
# Numbers of threads are told apart by a part of the backlog.
BACKLOG_SHARE = 4


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How long it takes.

    Attributes:
        backlog: requests that are all there at once.
        requests: of a trial at a rate, at least.
        trial_s: seconds of a trial at the capacity, at least.
        rounds: backlogs of each contestant.
        trials: rates of each contestant.
        bound_s: for the 99th percentile of latencies.
    """

    backlog: int = 96
    requests: int = 200
    trial_s: float = 20.0
    rounds: int = 3
    trials: int = 6
    bound_s: float = 3.0


@dataclass
class Standing:
    """What is known of a contestant.

    Attributes:
        contestant: who.
        threads: that compute one batch of its, the better number of those tried.
        agreement: of its outputs with those of our fp32 bundle.
        tokens: of its outputs, relative to what was asked for.
        backlogs: runs of all requests at once.
        trials: rates with their runs.
        low: highest rate that was kept; 0 for none.
        high: lowest rate that was not; 0 for none.
    """

    contestant: Contestant
    threads: int
    agreement: dict[str, float]
    tokens: float
    backlogs: list[Run] = field(default_factory=list)
    trials: list[tuple[float, Run]] = field(default_factory=list)
    low: float = 0.0
    high: float = 0.0

    @property
    def capacity(self) -> float:
        """Requests a second of a backlog."""
        return statistics.median(run.requests / run.wall_s for run in self.backlogs)

    @property
    def next_rate(self) -> float:
        """The rate to try next: in the middle of what is not known."""
        if not self.trials:
            return FIRST * self.capacity
        low, high = self.low or KEPT * self.capacity, self.high or TOO_MUCH * self.capacity
        return float((low * high) ** 0.5)

    def tried(self, rate: float, run: Run, bound_s: float) -> None:
        """Note a trial."""
        self.trials.append((rate, run))
        if run.p99_s <= bound_s:
            self.low = rate
        else:
            self.high = rate

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            **asdict(self.contestant),
            "threads": self.threads,
            "agreement": self.agreement,
            "tokens": self.tokens,
            "backlogs": [run.to_dict() for run in self.backlogs],
            "requests_per_second": self.capacity,
            "requests_per_cpu_second": statistics.median(run.requests / run.cpu_s for run in self.backlogs),
            "trials": [{"rate": rate, **run.to_dict()} for rate, run in self.trials],
            "highest_rate": self.low,
        }


def measure(
    processes: Processes,
    contestants: Sequence[Contestant],
    texts: Sequence[Text],
    threads: Sequence[int],
    effort: Effort,
    report: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Measure contestants on the same texts.

    Args:
        processes: of loaded systems.
        contestants: who takes part; the peer is left out where it cannot.
        texts: of the requests, taken from the first on.
        threads: numbers of threads that each is tried with.
        effort: how long.
        report: told what happens, a line at a time.

    Returns:
        Each contestant's standing as JSON values.

    Raises:
        BenchError: ours failed, or somebody does not do the same work.
    """
    backlog = [text.source for text in texts[: effort.backlog]]
    standings = []
    for contestant in contestants:
        try:
            standings.append(_begin(processes, contestant, texts[: effort.backlog], threads))
        except BenchError as error:
            if contestant.system != PEER:
                raise
            report(f"not measured: {error}")
    for number, standing in interleaved(standings, effort.rounds):
        time.sleep(PAUSE_S)
        run = processes.run(standing.contestant, standing.threads, backlog)
        standing.backlogs.append(run)
        report(f"backlog {number + 1}: {standing.contestant}: {run.requests / run.wall_s:.2f} requests a second")
    for number, standing in interleaved(standings, effort.trials):
        time.sleep(PAUSE_S)
        rate, count = standing.next_rate, max(effort.requests, int(effort.trial_s * standing.capacity))
        sources = [text.source for text in texts[:count]]
        arrivals = poisson(rate, len(sources), number)
        run = processes.run(standing.contestant, standing.threads, sources, arrivals, effort.bound_s)
        standing.tried(rate, run, effort.bound_s)
        report(f"trial {number + 1}: {standing.contestant}: {rate:.2f} requests a second, p99 {run.p99_s:.2f} s")
    return [standing.to_dict() for standing in standings]


def _begin(processes: Processes, contestant: Contestant, texts: Sequence[Text], threads: Sequence[int]) -> Standing:
    """Warm up with each number of threads, compare outputs, and keep the better number."""
    sources = [text.source for text in texts]
    expected = processes.run(Contestant(OURS, "fp32", "window"), threads[0], sources).outputs
    _share_of_asked("tfexport fp32", expected, texts, 0.0)
    some = sources[: max(1, len(sources) // BACKLOG_SHARE)]
    runs = {count: processes.run(contestant, count, some) for count in threads}
    best = min(runs, key=lambda count: runs[count].wall_s)
    outputs = runs[best].outputs
    tokens = _share_of_asked(
        str(contestant), outputs, texts[: len(some)], 0.0 if contestant.precision == "fp32" else TOTAL_WITHIN
    )
    if contestant.system == OURS and contestant.precision == "fp32" and outputs != expected[: len(some)]:
        raise BenchError(f"{contestant}: does not say what generate says; fast and wrong is not timed")
    return Standing(contestant, best, agreement(outputs, expected[: len(some)]), tokens)


def _share_of_asked(who: str, outputs: Sequence[Sequence[int]], texts: Sequence[Text], within: float) -> float:
    """Return the tokens of outputs over those asked for, and make sure that it is the same work."""
    said, asked = sum(map(len, outputs)), sum(text.length - 1 for text in texts)
    if abs(said - asked) > within * asked:
        raise BenchError(f"{who}: its texts have {said} tokens, {asked} were asked for; that is other work")
    return said / asked
