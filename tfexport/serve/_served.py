"""Serve one loaded model: its threads and open requests."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import math
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from tfexport import errors
from tfexport.decode.offline import decode, warm_up
from tfexport.decode.request import Request
from tfexport.decode.result import Hypothesis
from tfexport.errors import ServingError, TfexportError
from tfexport.generation import DecodeConfig
from tfexport.model.model import Model
from tfexport.runtime.sources import stand_in
from tfexport.serve._generation import AnyGeneration, Event
from tfexport.serve._scheduler import Worker
from tfexport.serve.config import ServingConfig
from tfexport.serve.observer import Observer, Outcome
from tfexport.text.compare import check_texts

logger = logging.getLogger(__name__)
T = TypeVar("T")
MAX_WAITING = 8  # alignments
NUM_RECORDED = 8  # recorded texts to check before serving; `tfexport verify` checks all
WARM_UP_TOKENS = 4
_OUTCOMES: dict[type[BaseException], Outcome] = {
    errors.QueueFull: "queue_full",
    errors.Draining: "draining",
    errors.DeadlineExceeded: "deadline",
    errors.Cancelled: "cancelled",
    asyncio.CancelledError: "cancelled",
    errors.InputError: "invalid",
    errors.ConfigError: "invalid",
}


class Calls:
    """Align, encode and read sources, one at a time; used on one event loop only."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._executor = loop, ThreadPoolExecutor(1, "tfexport-calls")
        self.pending: set[asyncio.Task[Any]] = set()
        self._reason: ServingError | None = None

    def check_room(self, most: int, what: str = "alignments") -> None:
        if len(self.pending) > most:
            raise errors.QueueFull(f"{most} {what} are waiting, which is the limit; try again later")

    def submit(self, compute: Callable[[], T]) -> asyncio.Task[T]:
        """Queue a computation; it is skipped if its task is cancelled first."""
        task = self._loop.create_task(self._compute(compute))
        self.pending.add(task)
        task.add_done_callback(self.pending.discard)
        return task

    async def join(self, end: float, hang_s: float) -> bool:
        """Wait until `end`, at most `hang_s` for each; return whether all have ended."""
        while self.pending:
            wait_s = max(0.0, min(end - time.monotonic(), hang_s))
            done, _ = await asyncio.wait(tuple(self.pending), timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                return False
        return True

    def close(self, reason: ServingError) -> None:
        """Stop after the current computation; pending tasks raise `reason`."""
        self._reason = reason
        for task in self.pending:
            task.cancel()
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _compute(self, compute: Callable[[], T]) -> T:
        try:
            return await self._loop.run_in_executor(self._executor, compute)
        except asyncio.CancelledError:
            if self._reason:
                raise copy.copy(self._reason) from None
            raise


class Served:
    """A model, its threads, and its open requests; used on one event loop only."""

    def __init__(self, model: Model, config: ServingConfig, observer: Observer) -> None:
        loop = asyncio.get_running_loop()
        self.model, self.calls = model, Calls(loop)
        callbacks = _on_loop(loop, self._deliver), _on_loop(loop, self._end_all)
        self.worker = Worker(model.session, config, observer, *callbacks)
        self._config, self._observer = config, observer
        self.open: dict[AnyGeneration, asyncio.TimerHandle | None] = {}  # with its timer for the deadline
        self._is_answered = True
        # Open requests refer to this object through `end`, so the thread runs until they are answered.
        weakref.finalize(self, self.worker.abort, errors.Draining("the engine was deleted")).atexit = False

    @property
    def is_working(self) -> bool:
        """Whether its thread has not failed and makes progress."""
        return self.worker.failure is None and self.worker.silent_s < self._config.stall_s

    @property
    def load(self) -> int:
        """Number of rows of open requests, and of other calls."""
        return sum(generation.num_rows for generation in self.open) + len(self.calls.pending)

    def begin(self, generation: AnyGeneration, read: Callable[[], Request] | None = None) -> None:
        """Queue a request; `read` replaces its stand-in on another thread first."""
        if read:
            self.worker.waiting.expect(generation)
        else:
            self.worker.waiting.put(generation)
        self.open[generation] = None
        if generation.deadline < math.inf:  # the thread checks it too, but only between steps
            left_s = generation.deadline - time.monotonic()
            self.open[generation] = asyncio.get_running_loop().call_later(left_s, self._end_late, generation)
        if read:
            compute = partial(_read, generation, read)
            self.calls.submit(compute).add_done_callback(partial(self._take_source, generation))
        else:
            with self._own_errors(generation):
                generation.begin()

    def end(self, generation: AnyGeneration, reason: TfexportError) -> None:
        self._close(generation)
        self.worker.waiting.cancel(generation)
        generation.finish(reason)
        outcome = "slow_reader" if generation.is_behind else outcome_of(reason)
        self._observer.ended(outcome, "", time.monotonic() - generation.arrived, 0, None)

    async def stop(self, reason: ServingError, timeout_s: float | None) -> bool:
        """Finish accepted requests and close; return whether all were answered in time."""
        if not await self._finish(reason, timeout_s):
            self._is_answered &= not self.calls.pending
            self.worker.abort(reason)
            self._end_all(reason)
        self.calls.close(reason)
        if await asyncio.to_thread(self.worker.join, self._config.stall_s):
            self.model.close()
        else:  # the hanging thread still uses its model
            logger.warning("a model's thread hangs and was abandoned; its memory is freed if the thread continues")
        return self._is_answered

    async def _finish(self, reason: ServingError, timeout_s: float | None) -> bool:
        end = math.inf if timeout_s is None else time.monotonic() + timeout_s
        self.worker.waiting.close(reason)
        wait_s = 0.0
        while not await asyncio.to_thread(self.worker.join, wait_s):
            wait_s = min(end - time.monotonic(), self._config.hang_s - self.worker.silent_s)
            if wait_s <= 0:
                return False
        return await self.calls.join(end, self._config.hang_s)

    def _take_source(self, generation: AnyGeneration, reading: asyncio.Task[Request]) -> None:
        reading.exception()  # an error that nobody retrieves is logged
        if generation not in self.open:
            return
        try:
            generation.read(reading.result())
            self.worker.waiting.put(generation)
        except TfexportError as error:
            self.end(generation, error)
        except Exception as error:
            logger.exception("a source could not be read")
            self.end(generation, errors.BackendError(f"the source could not be read: {error!r}"))
        else:
            with self._own_errors(generation):
                generation.begin()

    def _deliver(self, events: list[Event]) -> None:
        for generation, token_ids, outcome in events:
            if generation in self.open:  # otherwise it has already ended
                with self._own_errors(generation):
                    if token_ids:
                        generation.receive(token_ids)
                    self._take(generation, outcome)

    def _take(self, generation: AnyGeneration, outcome: list[Hypothesis] | TfexportError | None) -> None:
        if isinstance(outcome, TfexportError):
            self.end(generation, outcome)
        elif outcome is not None and generation.request.config.replace_unknowns:
            compute = partial(_answers, generation, outcome)
            self.calls.submit(compute).add_done_callback(partial(self._take_aligned, generation, outcome))
        elif outcome is not None:
            self._answer(generation, outcome, generation.answers(outcome))
        elif generation.is_behind:
            problem = "the stream was read too slowly; read each item as soon as it is sent"
            self.end(generation, errors.Cancelled(problem))

    def _take_aligned(
        self, generation: AnyGeneration, hypotheses: list[Hypothesis], answers: asyncio.Task[list[Any]]
    ) -> None:
        error = answers.exception()
        if generation not in self.open:
            return
        if isinstance(error, TfexportError):
            self.end(generation, error)
            return
        with self._own_errors(generation):
            self._answer(generation, hypotheses, answers.result())

    def _answer(self, generation: AnyGeneration, hypotheses: list[Hypothesis], answers: list[Any]) -> None:
        generation.finish(answers)
        self._close(generation)
        now, prefix_len = time.monotonic(), len(generation.request.prompt) - 1 - generation.request.num_forced
        lengths = [len(hypothesis.token_ids) - prefix_len for hypothesis in hypotheses]
        per_token_s = (now - generation.began) / (lengths[0] - 1) if lengths[0] > 1 else None
        reason = hypotheses[0].finish_reason
        self._observer.ended("ok", reason, now - generation.arrived, sum(lengths), per_token_s)

    def _end_late(self, generation: AnyGeneration) -> None:
        if generation in self.open:
            self.end(generation, generation.late())

    def _end_all(self, reason: TfexportError) -> None:
        for generation in tuple(self.open):
            self._is_answered = False
            self.end(generation, copy.copy(reason))

    def _close(self, generation: AnyGeneration) -> None:
        if timer := self.open.pop(generation):
            timer.cancel()

    @contextlib.contextmanager
    def _own_errors(self, generation: AnyGeneration) -> Iterator[None]:
        """End only this generation if its answer cannot be built."""
        try:
            yield
        except Exception as error:
            logger.exception("an answer could not be decoded to text")
            self.end(generation, errors.BackendError(f"the answer could not be decoded to text: {error!r}"))


def _answers(generation: AnyGeneration, hypotheses: list[Hypothesis]) -> list[Any]:
    return [] if generation.is_done else generation.answers(hypotheses)


def _read(generation: AnyGeneration, read: Callable[[], Request]) -> Request:
    return generation.request if generation.is_done else read()


def outcome_of(error: BaseException) -> Outcome:
    return next((outcome for kind, outcome in _OUTCOMES.items() if isinstance(error, kind)), "error")


def _on_loop(loop: asyncio.AbstractEventLoop, method: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return a thread-safe call of a method that does not keep its object alive."""
    weak = weakref.WeakMethod(method)

    def call(argument: Any) -> None:
        if (bound := weak()) is not None:
            bound(argument)

    def post(argument: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(call, argument)

    return post


def prepare(model: Model, slots: int) -> None:
    """Warm a model up with one row and with all slots, and check its recorded texts."""
    spec, tokenizer, source = model.spec, model.tokenizer, stand_in(model.spec.source)
    if model.processor:
        with contextlib.suppress(errors.InputError):
            model.processor.extract(b"")  # raises BackendError without the packages that it always needs
    if not spec.has_decoder:
        warm_up(model.session, slots, 1)
        if tokenizer:
            check_texts(tokenizer)
        return
    num_tokens = min(WARM_UP_TOKENS, spec.max_target_length)
    config = DecodeConfig(max_new_tokens=num_tokens, min_new_tokens=num_tokens)
    for rows in (1, slots):
        decode(model.session, [source] * rows, config, batch_size=rows)
    if not tokenizer or not tokenizer.text.samples:
        return
    check_texts(tokenizer)
    prefix = tokenizer.text.target_prefix
    samples = [sample for sample in tokenizer.text.samples if sample.target_ids][:NUM_RECORDED]
    if not samples or model.session.accuracy != "fp32":
        return
    longest = max(len(sample.target_ids) for sample in samples)
    config = DecodeConfig(max_new_tokens=min(longest, spec.max_target_length - len(prefix)))
    sources = [sample.source_ids for sample in samples]
    outputs = decode(model.session, sources, config, prefixes=[prefix] * len(samples))
    for sample, (best,) in zip(samples, outputs, strict=True):
        token_ids = best.token_ids[: len(sample.target_ids)]
        if token_ids != sample.target_ids:
            problem = f"the output of recorded text {sample.text!r} is {tokenizer.decode(token_ids)!r}"
            raise errors.ParityError(f"{problem}, expected {sample.output!r}; run tfexport verify")
