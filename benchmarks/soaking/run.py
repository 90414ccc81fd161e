"""The course of a soak: the first run, a warm-up, the load, and what is left when all is quiet."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from soaking.asks import Outcome, bursts, first_run, is_expected
from soaking.target import Target
from soaking.watched import Sample, sample
from tfexport.errors import BenchError, shortened

# What is not as expected is told so often in words.
MAX_TOLD = 20
# Of a burst; the asks of one are there at once and share batches.
MOST_AT_ONCE = 12
_FIRST_AT_ONCE = 8
# Until the server has noticed that connections are closed.
_SETTLES_IN_S = 3.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How long and how much.

    Attributes:
        load_s: under load, after the warm-up.
        warm_up_s: under the same load before.
        rate: asks a second of each target.
        reload_every_s: between two loadings of the bundle.
        sample_every_s: between two looks at the processes.
        seed: of all draws.
    """

    load_s: float
    warm_up_s: float
    rate: float = 4.0
    reload_every_s: float = 60.0
    sample_every_s: float = 5.0
    seed: int = 0


@dataclass
class Record:
    """What became of one target.

    Attributes:
        name: of the target.
        counts: asks by way and outcome, "texts" for all that are as in the first run.
        num_reloads: that went well.
        samples: under load, the warm-up included.
        before: what it held after the warm-up, when nobody asked.
        after: the same at the end.
        exit_code: of its process; None where it did not come so far.
        num_problems: that anything was not as expected.
        problems: the first of them in words.
    """

    name: str
    counts: Counter[str] = field(default_factory=Counter)
    num_reloads: int = 0
    samples: list[Sample] = field(default_factory=list)
    before: Sample | None = None
    after: Sample | None = None
    exit_code: int | None = None
    num_problems: int = 0
    problems: list[str] = field(default_factory=list)

    def note(self, problem: str) -> None:
        """Note something that is not as expected."""
        self.num_problems += 1
        if len(self.problems) < MAX_TOLD:
            self.problems.append(problem)


class Soak:
    """A soak of several targets, side by side.

    Attributes:
        plan: how long and how much.
        records: one for each target.
        began: when the load began, on the monotonic clock; None before.
        stop: when set, all ends soon and in order.
    """

    def __init__(self, targets: Sequence[Target], texts: Sequence[str], plan: Plan) -> None:
        """Take targets that are ready, and the texts to ask."""
        self.plan, self.stop = plan, asyncio.Event()
        self.records = [Record(target.name) for target in targets]
        self.began: float | None = None
        self._targets, self._texts = targets, texts
        self._first: Mapping[str, Outcome] = {}

    async def run(self, report: Callable[[str], None]) -> None:
        """Soak until the time is over or `stop` is set, and end the targets.

        Raises:
            BenchError: the targets do not say the same in the first run.
        """
        try:
            self._first = await self._compared(report)
            self.began = time.monotonic()
            await asyncio.gather(*map(self._soak, self._targets, self.records))
        finally:
            for target, record in zip(self._targets, self.records, strict=True):
                record.exit_code = await target.close()

    async def _compared(self, report: Callable[[str], None]) -> dict[str, Outcome]:
        """Ask every target everything once; all have to say the same."""
        asks, first = first_run(self._texts), dict[str, Outcome]()
        for target in self._targets:
            for index in range(0, len(asks), _FIRST_AT_ONCE):
                part = asks[index : index + _FIRST_AT_ONCE]
                for ask, outcome in zip(part, await target.ask(part), strict=True):
                    if not isinstance(outcome, list) or first.setdefault(ask.key, outcome) != outcome:
                        raise BenchError(f"{target.name}: {ask.key}: {_told(outcome)}, not {_told(first.get(ask.key))}")
        report(f"first run: {len(first)} answers, the same of {' and '.join(one.name for one in self._targets)}")
        return first

    async def _soak(self, target: Target, record: Record) -> None:
        assert self.began is not None
        warm = self.began + self.plan.warm_up_s
        try:
            await self._load(target, record, warm)
            record.before = await self._at_rest(target)
            await self._load(target, record, warm + self.plan.load_s)
            record.after = await self._at_rest(target)
        except* BenchError as errors:
            for error in errors.exceptions:
                record.note(str(error))
            self.stop.set()

    async def _load(self, target: Target, record: Record, until: float) -> None:
        """Let callers ask until then, while the bundle is loaded again and again and the process is watched."""
        async with asyncio.TaskGroup() as group:
            for number in range(target.callers):
                group.create_task(self._call(target, record, until, number))
            group.create_task(self._reload(target, record, until))
            group.create_task(self._watch(target, record, until))

    async def _call(self, target: Target, record: Record, until: float, number: int) -> None:
        rng = random.Random(f"{self.plan.seed} {target.name} {number} {until}")
        drawn = bursts(self._texts, rng, MOST_AT_ONCE)
        bursts_a_second = self.plan.rate / target.callers / ((1 + MOST_AT_ONCE) / 2)
        while await self._pause(rng.expovariate(bursts_a_second), until):
            burst = next(drawn)
            for ask, outcome in zip(burst, await target.ask(burst), strict=True):
                word = "texts" if isinstance(outcome, list) else outcome.partition(":")[0]
                record.counts[f"{ask.way}: {word}"] += 1
                if not is_expected(ask, outcome, self._first):
                    record.note(f"{ask.way} {ask.key}: {_told(outcome)}, not {_told(self._first.get(ask.key))}")

    async def _reload(self, target: Target, record: Record, until: float) -> None:
        while await self._pause(self.plan.reload_every_s, until):
            await target.reload()
            record.num_reloads += 1

    async def _watch(self, target: Target, record: Record, until: float) -> None:
        record.samples.append(self._sample(target))
        while await self._pause(self.plan.sample_every_s, until):
            record.samples.append(self._sample(target))

    async def _at_rest(self, target: Target) -> Sample:
        target.disconnect()
        await asyncio.sleep(_SETTLES_IN_S)
        return self._sample(target)

    def _sample(self, target: Target) -> Sample:
        assert self.began is not None
        return sample(target.pid, target.temporary, time.monotonic() - self.began)

    async def _pause(self, seconds: float, until: float) -> bool:
        """Wait, but not beyond the end; say whether to go on."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.stop.wait(), max(0.0, min(seconds, until - time.monotonic())))
        return not self.stop.is_set() and time.monotonic() < until


def _told(outcome: Outcome | None) -> str:
    return outcome if isinstance(outcome, str) else shortened(outcome)
