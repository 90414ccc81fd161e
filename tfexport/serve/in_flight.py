"""Requests in flight: accepted by a model, and not answered yet."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import math
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from tfexport.decode.result import Hypothesis
from tfexport.errors import (
    BackendError,
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    Draining,
    InputError,
    QueueFull,
    TfexportError,
)
from tfexport.serve.generation import Generation
from tfexport.serve.job import Event, Job
from tfexport.serve.observer import Observer, Outcome
from tfexport.serve.served import Served

logger = logging.getLogger(__name__)
Told = TypeVar("Told")
_OUTCOMES: dict[type[BaseException], Outcome] = {
    QueueFull: "queue_full",
    Draining: "draining",
    DeadlineExceeded: "deadline",
    Cancelled: "cancelled",
    asyncio.CancelledError: "cancelled",
    InputError: "invalid",
    ConfigError: "invalid",
}


@dataclass(frozen=True, eq=False)
class _Open:
    """A generation, the model that decodes it, and what ends it at its deadline."""

    generation: Generation[Any, Any]
    served: Served
    alarm: asyncio.TimerHandle | None


class InFlight:
    """Hands what models bring to who waits for it, and tells the observer how each request has ended, once.

    It belongs to one event loop.
    """

    def __init__(self, observer: Observer) -> None:
        """Begin with no request."""
        self._observer = observer
        self._open: dict[int, _Open] = {}

    def __len__(self) -> int:
        """Requests in flight."""
        return len(self._open)

    def begin(self, generation: Generation[Any, Any], served: Served) -> None:
        """Let a model take a generation, until its deadline at most.

        Raises:
            QueueFull: too many wait.
            ServingError: the model takes no more.
        """
        job = generation.job
        served.worker.submit(job)
        alarm = None
        if job.deadline < math.inf:  # the thread sees it too, but not while it is in the middle of something
            left_s = job.deadline - time.monotonic()
            alarm = asyncio.get_running_loop().call_later(left_s, _weakly(self._end_late), job)
        self._open[id(job)] = _Open(generation, served, alarm)
        with self._own_errors(generation):
            generation.begin()

    def end(self, generation: Generation[Any, Any], reason: TfexportError) -> None:
        """End a generation with an error."""
        job = generation.job
        self._close(job).worker.cancel(job)
        generation.finish(reason)
        self._tell(job, "slow_reader" if generation.is_behind else outcome_of(reason))

    def end_all(self, served: Served, reason: TfexportError) -> None:
        """End all generations that a model has accepted."""
        for opened in list(self._open.values()):
            if opened.served is served:
                served.is_answered = False
                self.end(opened.generation, copy.copy(reason))

    def deliver(self, events: list[Event]) -> None:
        """Take what a step has brought."""
        for event in events:
            if opened := self._open.get(id(event.job)):  # else it was ended meanwhile
                with self._own_errors(opened.generation):
                    self._hand_over(opened, event)

    @contextlib.contextmanager
    def refusals(self) -> Iterator[None]:
        """Tell the observer of requests that are refused, or left by who waits for them."""
        start = time.monotonic()
        try:
            yield
        except (TfexportError, asyncio.CancelledError) as error:
            self._observer.ended(outcome_of(error), "", time.monotonic() - start, 0, None)
            raise

    def _hand_over(self, opened: _Open, event: Event) -> None:
        generation = opened.generation
        if event.token_ids:
            generation.receive(event.token_ids)
        if isinstance(event.outcome, TfexportError):
            self.end(generation, event.outcome)
        elif event.outcome is not None and event.job.request.config.replace_unknowns:
            answers = opened.served.alignments.submit(partial(_answers, generation, event.outcome))
            answers.add_done_callback(partial(self._take_aligned, event.job, event.outcome))
        elif event.outcome is not None:
            self._finish(generation, event.outcome, generation.answers(event.outcome))
        elif generation.is_behind:
            self.end(generation, Cancelled("the stream was read too slowly; read it as it comes"))

    def _take_aligned(self, job: Job, hypotheses: list[Hypothesis], answers: asyncio.Future[list[Any]]) -> None:
        """Take answers whose unknown tokens were replaced."""
        error, opened = answers.exception(), self._open.get(id(job))
        if opened is None:
            return
        if isinstance(error, TfexportError):
            self.end(opened.generation, error)
            return
        with self._own_errors(opened.generation):
            self._finish(opened.generation, hypotheses, answers.result())

    def _finish(self, generation: Generation[Any, Any], hypotheses: list[Hypothesis], answers: list[Any]) -> None:
        """End a generation with its answers."""
        generation.finish(answers)
        job = generation.job
        self._close(job)
        prefix_len = len(job.request.prompt) - 1 - job.request.num_forced
        lengths = [len(one.token_ids) - prefix_len for one in hypotheses]
        per_token = (time.monotonic() - job.began) / (lengths[0] - 1) if lengths[0] > 1 else None
        self._tell(job, "ok", hypotheses[0].finish_reason, sum(lengths), per_token)

    def _end_late(self, job: Job) -> None:
        if opened := self._open.get(id(job)):
            self.end(opened.generation, job.late())

    def _close(self, job: Job) -> Served:
        """Forget a job that is finished; return what has decoded it."""
        opened = self._open.pop(id(job))
        if opened.alarm:
            opened.alarm.cancel()
        return opened.served

    @contextlib.contextmanager
    def _own_errors(self, generation: Generation[Any, Any]) -> Iterator[None]:
        """Let an error, such as of the tokenizer, end this generation alone."""
        try:
            yield
        except Exception as error:
            logger.exception("an answer could not be put into words")
            self.end(generation, BackendError(f"the answer could not be put into words: {error!r}"))

    def _tell(
        self, job: Job, outcome: Outcome, reason: str = "", num_tokens: int = 0, per_token_s: float | None = None
    ) -> None:
        self._observer.ended(outcome, reason, time.monotonic() - job.arrived, num_tokens, per_token_s)


def _answers(generation: Generation[Any, Any], hypotheses: list[Hypothesis]) -> list[Any]:
    """Return the answers of a generation, none where nobody waits for it any more."""
    return [] if generation.is_done else generation.answers(hypotheses)


def outcome_of(error: BaseException) -> Outcome:
    """Return how a request ends that is given this error."""
    return next((outcome for kind, outcome in _OUTCOMES.items() if isinstance(error, kind)), "error")


def on_loop(loop: asyncio.AbstractEventLoop, method: Callable[[Told], None]) -> Callable[[Told], None]:
    """Return what has a method called on an event loop, from any thread, as long as there are both."""
    call = _weakly(method)

    def post(told: Told) -> None:
        with contextlib.suppress(RuntimeError):  # nobody listens once the event loop is closed
            loop.call_soon_threadsafe(call, told)

    return post


def _weakly(method: Callable[[Told], None]) -> Callable[[Told], None]:
    """Return what calls a method as long as there is its object."""
    weak = weakref.WeakMethod(method)

    def call(told: Told) -> None:
        if (found := weak()) is not None:
            found(told)

    return call
