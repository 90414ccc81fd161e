"""Record times of decoder calls, one after another, or of requests on a schedule."""

from __future__ import annotations

import asyncio
import dataclasses
import statistics
import time
from array import array
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np

from tfexport.bench.config import MAX_REQUESTS, Cell
from tfexport.contract import ModelSpec
from tfexport.decode.offline import decode
from tfexport.errors import EngineFailed, InputError, ServingError
from tfexport.generation import DecodeConfig
from tfexport.model.model import Model
from tfexport.runtime.session import (
    Batch,
    Beams,
    BeamSteps,
    Candidates,
    GreedySteps,
    Ids,
    MultiBeam,
    MultiStep,
    Prompts,
    Session,
    best_columns,
)
from tfexport.runtime.sources import Sources, random_source, read_source

T = TypeVar("T")
Source: TypeAlias = str | Sequence[int]
WINDOWS, MIN_WINDOWS = 10, 3
STEPS_TOGETHER = 16  # greedy steps that are timed as one group
MAX_STEPS = 1_000_000  # recorded step times; more would distort the measured memory
_BATCHES, _MAX_TOKENS = 64, 1_000_000  # random batches: enough to avoid warm caches, in little memory
_FEATURE_BATCHES = 4  # of features, which are larger than caches
GRACE_S = 10  # after twice its length, until an open loop is cancelled


def clock(call: Callable[[], T]) -> tuple[float, T]:
    began = time.perf_counter()
    result = call()
    return time.perf_counter() - began, result


@dataclass(frozen=True)
class Call:
    """Times of one decoder call, in seconds; `tokens` counts the best hypotheses."""

    began: float
    first_token: float
    ended: float
    sequences: int
    source_tokens: int
    tokens: int
    encode_s: float
    reorder_s: float
    step_s: array[float]
    phases: Sequence[tuple[str, float, float]] = ()  # name, begin and seconds of each call of the session


def _doubles() -> array[float]:
    return array("d")


@dataclass
class Samples:
    """Measurements of one cell in one process; times are in seconds."""

    first_token_s: array[float] = field(default_factory=_doubles)  # from the call or the scheduled arrival
    latency_s: array[float] = field(default_factory=_doubles)
    per_token_s: array[float] = field(default_factory=_doubles)  # mean time per token after the first
    encode_s: array[float] = field(default_factory=_doubles)  # of each encoder call
    step_s: array[float] = field(default_factory=_doubles)  # of each step
    queue_s: array[float] = field(default_factory=_doubles)  # in the server scenario, until a request joined a batch
    windows: array[float] = field(default_factory=_doubles)  # tokens per second, or median latency of a server
    elapsed_s: float = 0.0
    busy_s: float = 0.0  # inside calls, or of the whole run in the server scenario
    stepping_s: float = 0.0
    reordering_s: float = 0.0
    sequences: int = 0
    source_tokens: int = 0
    tokens: int = 0
    slot_occupancy: float | None = None  # mean share of slots that a step uses
    refused: int = 0
    unserved: int = 0  # requests without an answer when the run was cancelled

    def add(self, call: Call) -> None:
        self.first_token_s.append(call.first_token - call.began)
        self.latency_s.append(call.ended - call.began)
        if len(call.step_s) > 1:
            self.per_token_s.append((call.ended - call.first_token) / (len(call.step_s) - 1))
        self.encode_s.append(call.encode_s)
        if len(self.step_s) + len(call.step_s) <= MAX_STEPS:
            self.step_s.extend(call.step_s)
        self.busy_s += call.ended - call.began
        self.stepping_s += sum(call.step_s)
        self.reordering_s += call.reorder_s
        self.sequences += call.sequences
        self.source_tokens += call.source_tokens
        self.tokens += call.tokens

    def to_dict(self) -> dict[str, Any]:
        return {name: list(value) if isinstance(value, array) else value for name, value in vars(self).items()}


class TimedSession:
    """Record the seconds of every call of a session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.encode_s = 0.0  # adding sources: encoding and prefill
        self.reorder_s = 0.0  # reordering and removing rows
        self.step_s = array("d")
        self.first_step_ended = 0.0
        self.phases: list[tuple[str, float, float]] = []

    def time(self, name: str, call: Callable[[], T]) -> tuple[float, T]:
        """Call the session and record a phase; return its seconds and its result."""
        began = time.perf_counter()
        seconds, result = clock(call)
        self.phases.append((name, began, seconds))
        return seconds, result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def batch(self, width: int = 1) -> _TimedBatch:
        batch = self._session.batch(width)
        if width > 1:
            return _TimedBeams(self, batch) if isinstance(batch, MultiBeam) else _TimedBatch(self, batch)
        return _TimedMultiStep(self, batch) if isinstance(batch, MultiStep) else _TimedBatch(self, batch)


class _TimedBatch:
    def __init__(self, session: TimedSession, batch: Batch) -> None:
        self.width, self.can_join = batch.width, batch.can_join
        self._times, self._batch = session, batch

    @property
    def lengths(self) -> Ids:
        return self._batch.lengths

    def add(self, sources: Sources, prompts: Prompts) -> None:
        self._times.encode_s += self._times.time("encode and prefill", lambda: self._batch.add(sources, prompts))[0]

    def step(self, target_ids: Ids, num_candidates: int) -> Candidates:
        seconds, candidates = self._times.time("step", lambda: self._batch.step(target_ids, num_candidates))
        self._times.step_s.append(seconds)
        self._times.first_step_ended = self._times.first_step_ended or time.perf_counter()
        return candidates

    def reorder(self, rows: Ids) -> None:
        self._times.reorder_s += self._times.time("reorder", lambda: self._batch.reorder(rows))[0]

    def remove(self, sources: Ids) -> None:
        self._times.reorder_s += self._times.time("remove", lambda: self._batch.remove(sources))[0]


class _TimedMultiStep(_TimedBatch):
    def multi_step(self, target_ids: Ids, steps: GreedySteps) -> Candidates:
        batch, parts, best, left, most = cast(MultiStep, self._batch), list[Candidates](), target_ids, steps.most, 1
        while not parts or (left and steps.stop_ids.isdisjoint(best.tolist())):
            take = partial(batch.multi_step, best, steps._replace(most=most))
            seconds, part = self._times.time("steps" if parts else "step", take)
            taken = len(part.token_ids)
            self._times.step_s.extend([seconds / taken] * taken)
            self._times.first_step_ended = self._times.first_step_ended or time.perf_counter()
            parts.append(part)
            best, left = _best(part.token_ids[-1], steps.banned_ids), left - taken
            most = min(left, STEPS_TOGETHER)  # after a single step, which records the time to the first token
        columns = ("token_ids", "logits", "log_normalizer")
        return Candidates(*(np.concatenate([getattr(part, name) for part in parts]) for name in columns))


def _best(token_ids: Ids, banned_ids: frozenset[int]) -> Ids:
    best: Ids = np.take_along_axis(token_ids, best_columns(token_ids, banned_ids)[:, None], 1)[:, 0]
    return best


class _TimedBeams(_TimedBatch):
    def beam_steps(self, beams: Beams, steps: int) -> BeamSteps:
        # The first step is a single one, to record the time to the first token.
        batch, most = cast(MultiBeam, self._batch), min(steps, STEPS_TOGETHER) if self._times.step_s else 1
        seconds, found = self._times.time("steps", lambda: batch.beam_steps(beams, most))
        self._times.step_s.extend([seconds / found.steps] * found.steps)
        self._times.first_step_ended = self._times.first_step_ended or time.perf_counter()
        return found


def timed_call(session: Session, config: DecodeConfig, sources: Sequence[Sequence[int]]) -> Call:
    """Decode a batch as `generate` does, and record its times."""
    timed, began = TimedSession(session), time.perf_counter()
    outputs = decode(cast(Session, timed), sources, config, batch_size=len(sources))
    return Call(
        began=began,
        first_token=timed.first_step_ended,
        ended=time.perf_counter(),
        sequences=len(sources),
        source_tokens=sum(read_source(session.spec.source, source)[1] for source in sources),
        tokens=sum(len(best.token_ids) for best, *_ in outputs),
        encode_s=timed.encode_s,
        reorder_s=timed.reorder_s,
        step_s=timed.step_s,
        phases=timed.phases,
    )


def closed_loop(
    call: Callable[[Sequence[Sequence[int]]], Call],
    batches: Sequence[Sequence[Sequence[int]]],
    seconds: float,
    *,
    now: Callable[[], float] = time.perf_counter,
) -> Samples:
    """Make one call after another; a window is a tenth of `seconds` or a call."""
    samples, pool = Samples(), cycle(batches)
    began = now()
    while len(samples.windows) < MIN_WINDOWS or (now() - began < seconds and len(samples.latency_s) < MAX_REQUESTS):
        start, tokens, elapsed = now(), samples.tokens, 0.0
        while not elapsed or elapsed < seconds / WINDOWS:
            samples.add(call(next(pool)))
            elapsed = now() - start
        samples.windows.append((samples.tokens - tokens) / elapsed)
    samples.elapsed_s = now() - began
    return samples


@dataclass(frozen=True)
class Answer:
    """The answer to one request, with times of the event loop."""

    first_token: float | None
    ended: float
    source_tokens: int  # 0 if unknown
    tokens: int


Ask: TypeAlias = Callable[[Source], Awaitable[Answer]]


def poisson(rate: float, seconds: float, seed: int) -> array[float]:
    """Draw ascending arrival times of a Poisson process in seconds, at least one."""
    rng = np.random.default_rng(seed)
    arrivals = array("d", [rng.exponential(1 / rate)])
    while arrivals[-1] < seconds and len(arrivals) < 2 * MAX_REQUESTS:
        arrivals.append(arrivals[-1] + rng.exponential(1 / rate))
    return arrivals[:-1] or arrivals


async def open_loop(ask: Ask, sources: Sequence[Source], arrivals: Sequence[float]) -> Samples:
    """Send requests at `arrivals`; all times count from the scheduled arrival."""
    now = asyncio.get_running_loop().time
    began, samples, answers = now(), Samples(), list[tuple[float, Answer]]()

    async def one(arrived: float, source: Source) -> None:
        try:
            answers.append((arrived, await ask(source)))
        except EngineFailed:
            raise
        except ServingError:
            samples.refused += 1

    try:
        async with asyncio.timeout(2 * arrivals[-1] + GRACE_S), asyncio.TaskGroup() as group:
            for arrival, source in zip(arrivals, cycle(sources), strict=False):
                # Sleep even if late, so that other requests make progress.
                await asyncio.sleep(max(0.0, began + arrival - now()))
                group.create_task(one(began + arrival, source))
    except TimeoutError:
        pass
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    for arrived, answer in sorted(answers, key=lambda pair: pair[0]):
        samples.latency_s.append(answer.ended - arrived)
        if answer.first_token is not None:
            samples.first_token_s.append(answer.first_token - arrived)
            if answer.tokens > 1:
                samples.per_token_s.append((answer.ended - answer.first_token) / (answer.tokens - 1))
        samples.source_tokens += answer.source_tokens
        samples.tokens += answer.tokens
    samples.sequences = len(answers)
    samples.elapsed_s = max((answer.ended for _, answer in answers), default=began) - began
    samples.unserved = len(arrivals) - samples.refused - len(answers)
    size = len(answers) // WINDOWS
    parts = [samples.latency_s[i * size : (i + 1) * size] for i in range(WINDOWS if size else 0)]
    samples.windows = array("d", map(statistics.median, parts))
    return samples


def random_batches(spec: ModelSpec, cell: Cell, seed: int) -> list[list[Any]]:
    """Draw batches of random sources from a seed, without special tokens."""
    if not spec.source_vocab:
        rng, length = np.random.default_rng(seed), cell.source_length or spec.max_source_length
        few = range(_FEATURE_BATCHES)
        return [[random_source(spec.source, rng, length) for _ in range(cell.batch_size or 1)] for _ in few]
    special = dataclasses.asdict(spec.tokens).values()
    ordinary = np.array([token for token in range(spec.source_vocab) if token not in special] or [spec.tokens.eos])
    shape = (cell.batch_size or 1, cell.source_length or 1)
    count = max(1, min(_BATCHES, _MAX_TOKENS // (shape[0] * shape[1])))
    batches: list[list[list[int]]] = np.random.default_rng(seed).choice(ordinary, (count, *shape)).tolist()
    return batches


def text_batches(sources: Sequence[list[int]], batch_size: int, seed: int) -> list[list[list[int]]]:
    ordered = sorted(sources, key=len, reverse=True)
    # Without shuffling, the windows would measure different lengths.
    return shuffled([ordered[start : start + batch_size] for start in range(0, len(ordered), batch_size)], seed)


def shuffled(sources: Sequence[T], seed: int) -> list[T]:
    return [sources[index] for index in np.random.default_rng(seed).permutation(len(sources))]


def encoded(model: Model, texts: Sequence[str]) -> list[Any]:
    if model.reads == "text" and model.tokenizer is None:
        raise InputError("this bundle has no tokenizer for the texts of --input; omit it to use random sources")
    return model.read(texts)
