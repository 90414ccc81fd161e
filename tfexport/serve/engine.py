"""A model for many callers: requests join and leave the running batches, answers come as if each were alone."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import logging
import math
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

from tfexport.decode.pieces import Pieces
from tfexport.decode.request import Request, check_requests
from tfexport.decode.result import Hypothesis
from tfexport.errors import (
    BackendError,
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    Draining,
    EngineFailed,
    InputError,
    QueueFull,
    TfexportError,
    raise_all,
    shortened,
)
from tfexport.generation import DecodeConfig
from tfexport.model import Model, Result, load, result_of
from tfexport.serve.config import MAX_S, ServingConfig
from tfexport.serve.generation import Answer, Generation, Ids, Item, Texts
from tfexport.serve.job import Event, Job, num_rows
from tfexport.serve.observer import Guarded, Observer, Outcome
from tfexport.serve.prepare import prepare
from tfexport.serve.worker import Worker

logger = logging.getLogger(__name__)
Told = TypeVar("Told")
State = Literal["starting", "ready", "draining", "failed", "stopped"]
_OUTCOMES: dict[type[TfexportError], Outcome] = {
    QueueFull: "queue_full",
    Draining: "draining",
    DeadlineExceeded: "deadline",
    Cancelled: "cancelled",
    InputError: "invalid",
    ConfigError: "invalid",
}


@dataclass(eq=False)
class _Served:
    """A model, the thread that decodes it, and whether all that it accepted was answered."""

    model: Model
    worker: Worker
    is_answered: bool = True


class Engine:
    """Serves one model to many callers of one event loop; results are those of `Model.generate` of each text alone.

    `async with Engine(bundle) as engine:` starts it and drains it at the end.
    """

    def __init__(
        self,
        bundle: str | PathLike[str],
        config: ServingConfig | None = None,
        *,
        observer: Observer | None = None,
        **options: Any,
    ) -> None:
        """Name what is served; `start` loads it.

        Args:
            bundle: path of the bundle.
            config: slots, queue and limits; None for the defaults.
            observer: told of everything, for metrics.
            options: of `tfexport.load`: backend, form, threads, device, engine.
        """
        self.config = config or ServingConfig()
        self._bundle, self._options = bundle, options
        self._observer = Guarded(observer) if observer else Observer()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._served: _Served | None = None
        self._state: State = "starting"
        self._open_jobs: dict[int, tuple[Generation[Any, Any], _Served]] = {}
        self._retiring: list[_Served] = []
        self._replacing = asyncio.Lock()

    @property
    def state(self) -> State:
        """What the engine is about; "failed" once its thread has."""
        if self._served and self._served.worker.failure is not None:
            return "failed"
        return self._state

    @property
    def is_ready(self) -> bool:
        """Whether it takes requests and its thread gives signs of life."""
        return self.state == "ready" and self._current.worker.silent_s < self.config.stall_s

    @property
    def model(self) -> Model:
        """The model that new requests are decoded with.

        Raises:
            EngineFailed: the engine was not started.
        """
        return self._current.model

    @property
    def num_waiting(self) -> int:
        """Requests that have not joined a batch."""
        return sum(len(worker.waiting) for worker in self._workers)

    @property
    def num_running(self) -> int:
        """Requests that are decoded."""
        return len(self._open_jobs) - self.num_waiting

    @property
    def slots(self) -> int:
        """Rows that are decoded at once."""
        return self._current.worker.slots

    @property
    def num_slots_used(self) -> int:
        """Rows that are decoded just now."""
        return sum(worker.num_rows for worker in self._workers)

    async def start(self) -> Self:
        """Load the bundle, warm it up, compare it with its recorded texts, and begin to take requests.

        Raises:
            TfexportError: what `tfexport.load` raises.
            ParityError: the model says something else than was recorded.
            EngineFailed: the engine was started before.
            Draining: the engine was drained before it was ready.
        """
        if self._loop or self.state != "starting":
            raise EngineFailed("an engine is started once; make another one")
        self._loop = asyncio.get_running_loop()
        model = await self._open(self._bundle)
        if self._state != "starting":
            model.close()
            raise Draining("the engine was drained before it was ready")
        self._served = self._serve(model)
        self._state = "ready"
        return self

    async def replace(self, bundle: str | PathLike[str] | None = None) -> None:
        """Serve another bundle, and no request is lost: what was accepted is answered by the old one.

        Args:
            bundle: path; None for the one that is served, whose files have changed.

        Raises:
            TfexportError: the bundle cannot be served; the old one goes on.
        """
        self._check_loop()
        async with self._replacing:
            old = self._current
            self._check_replaceable()
            model = await self._open(bundle or self._bundle)
            try:
                self._check_replaceable()
            except TfexportError:
                model.close()
                raise
            self._served, self._bundle = self._serve(model), bundle or self._bundle
            self._retiring.append(old)
            await self._stop(old, Draining("the bundle was replaced"), None)
            self._retiring.remove(old)

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Take no more requests, finish those that were accepted, and stop.

        Args:
            timeout_s: after which those that are left get `Draining`; None for as long as it takes.

        Returns:
            Whether all were answered.
        """
        if self._served is None or self._state == "stopped":
            self._state = "stopped"
            return True
        self._state = "draining"
        reason = Draining("the engine is about to stop; ask another one")
        self._served.worker.close(reason)  # before anything else can happen
        stops = (self._stop(served, reason, timeout_s) for served in (*self._retiring, self._served))
        are_answered = all(await asyncio.gather(*stops))
        self._state = "stopped"
        return are_answered

    async def _stop(self, served: _Served, reason: Draining, timeout_s: float | None) -> bool:
        """Let a model finish what it has accepted, then close it; answer the rest with the reason after the time."""
        worker = served.worker
        worker.close(reason)
        has_ended = await asyncio.to_thread(worker.join, timeout_s)
        if not has_ended:
            worker.abort(reason)
            self._end_all(served, reason)
            has_ended = await asyncio.to_thread(worker.join, self.config.stall_s)
        if has_ended:  # else the thread hangs, and needs its model
            served.model.close()
        return served.is_answered

    async def __aenter__(self) -> Self:
        """Start."""
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Drain."""
        await self.drain()

    def submit(
        self,
        text: str,
        *,
        prefix: str = "",
        stream: bool = False,
        priority: float = 0.0,
        timeout_s: float | None = None,
        config: DecodeConfig | None = None,
        **options: Any,
    ) -> Generation[str, Result]:
        """Ask for a text; the answers are those of `Model.generate` of it alone.

        Args:
            text: of the source.
            prefix: what each answer begins with.
            stream: hand out pieces as they come, to who iterates over the generation.
            priority: seconds that the request counts as older than it is.
            timeout_s: seconds that it may take; None, or more than the engine allows, for what that allows.
            config: how to decode, in place of the bundle's defaults; None for those.
            options: fields of `DecodeConfig`, which go before both.

        Raises:
            ConfigError: options that are unknown, out of range or contradictory.
            InputError: the model, or this engine, cannot take the request.
            QueueFull: too many requests wait; it says when to come again.
            Draining: the engine is about to stop.
            EngineFailed: the engine has failed.
        """
        with self._refusals():
            model = self.model
            if model.tokenizer is None:
                raise InputError("this bundle has no tokenizer; ask with token ids")
            tokenizer, decoding = model.tokenizer, model.decoding(config, **options)
            if decoding.replace_unknowns:
                raise InputError("request: replace_unknowns is not served; set it to false, or use Model.generate")
            (source,) = tokenizer.encode([text])
            begin, fixed = tokenizer.begin_target(prefix), len(tokenizer.text.target_prefix)
            request = self._check(model, source, begin, decoding, num_fixed=fixed, stream=stream)
            given = fixed if decoding.prefix_bias_beta else len(begin)
            tokens = Texts(Pieces(tokenizer.decode, given, decoding.strings)) if stream else None
            job = self._job(request, priority, timeout_s)
            generation = Generation(
                job, lambda found: result_of(tokenizer, found, decoding), tokens, self.config.stream_buffer, self._end
            )
            return self._begin(generation)

    def submit_ids(
        self,
        source: Sequence[int],
        *,
        prefix: Sequence[int] = (),
        stream: bool = False,
        priority: float = 0.0,
        timeout_s: float | None = None,
        config: DecodeConfig | None = None,
        **options: Any,
    ) -> Generation[int, Hypothesis]:
        """Ask with token ids; see `submit`.

        Args:
            source: token ids, special tokens included.
            prefix: token ids that each answer begins with, without the start token.
            stream: hand out token ids as they come.
            priority: seconds that the request counts as older than it is.
            timeout_s: seconds that it may take.
            config: how to decode, in place of the bundle's defaults.
            options: fields of `DecodeConfig`, which go before both.

        Raises:
            TfexportError: those of `submit`.
        """
        with self._refusals():
            model = self.model
            request = self._check(model, source, prefix, model.decoding(config, **options), stream=stream)
            job = self._job(request, priority, timeout_s)
            tokens = Ids() if stream else None
            return self._begin(Generation(job, lambda found: found, tokens, self.config.stream_buffer, self._end))

    async def generate(self, text: str, **options: Any) -> list[Result]:
        """Return the answers to a text, best first; `submit` has the arguments.

        Raises:
            TfexportError: those of `submit`.
            DeadlineExceeded: the request took too long.
        """
        return await self.submit(text, **options)

    async def generate_ids(self, source: Sequence[int], **options: Any) -> list[Hypothesis]:
        """Return the answers to token ids, best first; `submit_ids` has the arguments."""
        return await self.submit_ids(source, **options)

    def stream(self, text: str, **options: Any) -> AsyncIterator[str]:
        """Return the answer to a text in pieces as they come; `submit` has the arguments."""
        return aiter(self.submit(text, stream=True, **options))

    def stream_ids(self, source: Sequence[int], **options: Any) -> AsyncIterator[int]:
        """Return the answer to token ids one by one as they come; `submit_ids` has the arguments."""
        return aiter(self.submit_ids(source, stream=True, **options))

    @property
    def _workers(self) -> list[Worker]:
        return [served.worker for served in (*self._retiring, self._served) if served]

    def _check_loop(self) -> None:
        """Refuse who runs on another event loop, or on none: nothing would ever wake it."""
        loop = None
        with contextlib.suppress(RuntimeError):
            loop = asyncio.get_running_loop()
        if self._loop and loop is not self._loop:
            raise EngineFailed("the engine belongs to the event loop that it was started on; ask it from there")

    def _check_replaceable(self) -> None:
        """Refuse another bundle where it would never be served."""
        if self._state != "ready":
            raise Draining("the engine is about to stop and takes no other bundle")

    @property
    def _current(self) -> _Served:
        if self._served is None:
            raise EngineFailed("the engine was not started; use async with, or await start()")
        return self._served

    async def _open(self, bundle: str | PathLike[str]) -> Model:
        def opened() -> Model:
            model = load(bundle, **self._options)
            try:
                prepare(model, self.config.slots)
            except TfexportError:
                model.close()
                raise
            return model

        return await asyncio.to_thread(opened)

    def _serve(self, model: Model) -> _Served:
        assert self._loop
        deliver, fail = _on_loop(self._loop, self._deliver), _on_loop(self._loop, self._fail)
        worker = Worker(model.session, self.config, self._observer, deliver, fail)
        weakref.finalize(self, worker.abort, Draining("the engine is gone")).atexit = False
        return _Served(model, worker)

    def _check(
        self,
        model: Model,
        source: Sequence[int],
        prefix: Sequence[int],
        decoding: DecodeConfig,
        *,
        num_fixed: int = 0,
        stream: bool,
    ) -> Request:
        problems = []
        if decoding.num_beams > self.config.max_num_beams:
            problems.append(f"num_beams is {decoding.num_beams}, the limit is {self.config.max_num_beams}; lower it")
        if (rows := num_rows(decoding)) > self.slots:
            problems.append(f"the request takes {rows} slots of {self.slots}; lower num_beams or num_return_sequences")
        if stream:
            problems += [
                f"{name} is {getattr(decoding, name)}, but a stream hands out one answer as it comes; set it to 1"
                for name in ("num_beams", "num_return_sequences")
                if getattr(decoding, name) > 1
            ]
        raise_all(InputError, "request", problems)
        text_of = model.tokenizer.decode if model.tokenizer else None
        (request,) = check_requests(model.session, [source], decoding, [prefix], text_of, num_fixed)
        return dataclasses.replace(request, stream=stream)

    def _job(self, request: Request, priority: float, timeout_s: float | None) -> Job:
        problems = []
        if not (_is_number(priority) and abs(priority) <= MAX_S):
            problems.append(f"priority is {shortened(priority)}, expected seconds from -{MAX_S} to {MAX_S}")
        if timeout_s is not None and not (_is_number(timeout_s) and 0 < timeout_s <= MAX_S):
            problems.append(f"timeout_s is {shortened(timeout_s)}, expected None or above 0 and up to {MAX_S}")
        raise_all(InputError, "request", problems)
        now = time.monotonic()
        allowed = [limit for limit in (timeout_s, self.config.timeout_s) if limit is not None]
        return Job(request, now, priority, deadline=now + min(allowed, default=math.inf))

    def _begin(self, generation: Generation[Item, Answer]) -> Generation[Item, Answer]:
        self._check_loop()
        served = self._current
        served.worker.submit(generation.job)
        self._open_jobs[id(generation.job)] = generation, served
        with self._own_errors(generation):
            generation.begin()
        return generation

    def _end(self, generation: Generation[Any, Any], reason: TfexportError) -> None:
        """End a generation from this side."""
        _, served = self._open_jobs.pop(id(generation.job))
        served.worker.cancel(generation.job)
        generation.finish(reason)
        self._tell(generation.job, "slow_reader" if generation.is_behind else _outcome(reason))

    def _end_all(self, served: _Served, reason: TfexportError) -> None:
        """End all generations that a model has accepted."""
        for generation, its in list(self._open_jobs.values()):
            if its is served:
                served.is_answered = False
                self._end(generation, copy.copy(reason))

    def _fail(self, failed: EngineFailed) -> None:
        """End what was accepted by a thread that has failed."""
        for served in (*self._retiring, self._current):
            if served.worker.failure is not None:
                self._end_all(served, failed)

    def _deliver(self, events: list[Event]) -> None:
        for event in events:
            generation, _ = self._open_jobs.get(id(event.job), (None, None))
            if generation is not None:  # else it was cancelled meanwhile
                with self._own_errors(generation):
                    self._hand_over(generation, event)

    def _hand_over(self, generation: Generation[Any, Any], event: Event) -> None:
        if event.token_ids:
            generation.receive(event.token_ids)
        if event.outcome is not None:
            generation.finish(event.outcome)
            del self._open_jobs[id(event.job)]
            self._tell_outcome(event.job, event.outcome)
        elif generation.is_behind:
            self._end(generation, Cancelled("the stream was read too slowly; read it as it comes"))

    @contextlib.contextmanager
    def _own_errors(self, generation: Generation[Any, Any]) -> Iterator[None]:
        """Let an error, such as of the tokenizer, end this generation alone."""
        try:
            yield
        except Exception as error:
            logger.exception("an answer could not be put into words")
            self._end(generation, BackendError(f"the answer could not be put into words: {error!r}"))

    def _tell_outcome(self, job: Job, outcome: list[Hypothesis] | TfexportError) -> None:
        if isinstance(outcome, TfexportError):
            self._tell(job, _outcome(outcome))
            return
        prefix_len = len(job.request.prompt) - 1 - job.request.num_forced
        lengths = [len(one.token_ids) - prefix_len for one in outcome]
        per_token = (time.monotonic() - job.began) / (lengths[0] - 1) if lengths[0] > 1 else None
        self._tell(job, "ok", outcome[0].finish_reason, sum(lengths), per_token)

    def _tell(
        self, job: Job, outcome: Outcome, reason: str = "", num_tokens: int = 0, per_token_s: float | None = None
    ) -> None:
        self._observer.ended(outcome, reason, time.monotonic() - job.arrived, num_tokens, per_token_s)

    @contextlib.contextmanager
    def _refusals(self) -> Iterator[None]:
        """Tell the observer of requests that are refused at once."""
        start = time.monotonic()
        try:
            yield
        except TfexportError as error:
            self._observer.ended(_outcome(error), "", time.monotonic() - start, 0, None)
            raise


def _on_loop(loop: asyncio.AbstractEventLoop, method: Callable[[Told], None]) -> Callable[[Told], None]:
    """Return what has a method called on an event loop, from any thread, as long as there are both."""
    weak = weakref.WeakMethod(method)

    def call(told: Told) -> None:
        if (found := weak()) is not None:
            with contextlib.suppress(RuntimeError):  # nobody listens once the event loop is closed
                loop.call_soon_threadsafe(found, told)

    return call


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _outcome(error: TfexportError) -> Outcome:
    return next((outcome for kind, outcome in _OUTCOMES.items() if isinstance(error, kind)), "error")
