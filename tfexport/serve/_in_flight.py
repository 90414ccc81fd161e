"""Track the requests that a model accepted and has not answered."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import math
import time
import weakref
from collections.abc import Callable, Iterator
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
from tfexport.serve._generation import Event, Generation
from tfexport.serve._served import Served
from tfexport.serve.observer import Observer, Outcome

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


class InFlight:
    """Deliver a model's events to its generations, and report how each one ends.

    It is used on one event loop only.
    """

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._open: dict[int, Generation[Any, Any]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, generation: Generation[Any, Any], served: Served) -> None:
        """Submit a generation to a model, and start its deadline timer."""
        served.worker.waiting.put(generation)
        generation.served = served
        if generation.deadline < math.inf:  # the thread checks it too, but only between steps
            left_s = generation.deadline - time.monotonic()
            end_late = _weakly(self._end_late)
            generation.alarm = asyncio.get_running_loop().call_later(left_s, end_late, generation)
        self._open[generation.id] = generation
        with self._own_errors(generation):
            generation.begin()

    def end(self, generation: Generation[Any, Any], reason: TfexportError) -> None:
        """End a generation with an error."""
        self._close(generation)
        generation.served.worker.waiting.cancel(generation)
        generation.finish(reason)
        self._tell(generation, "slow_reader" if generation.is_behind else outcome_of(reason))

    def end_all(self, served: Served, reason: TfexportError) -> None:
        """End all generations that a model accepted."""
        for generation in list(self._open.values()):
            if generation.served is served:
                served.is_answered = False
                self.end(generation, copy.copy(reason))

    def deliver(self, events: list[Event]) -> None:
        """Process the events of a step."""
        for event in events:
            if event.generation.id in self._open:  # otherwise it has already ended
                with self._own_errors(event.generation):
                    self._hand_over(*event)

    @contextlib.contextmanager
    def refusals(self) -> Iterator[None]:
        """Report requests that are refused, or cancelled by the waiting task."""
        start = time.monotonic()
        try:
            yield
        except (TfexportError, asyncio.CancelledError) as error:
            self._observer.ended(outcome_of(error), "", time.monotonic() - start, 0, None)
            raise

    def _hand_over(
        self,
        generation: Generation[Any, Any],
        token_ids: tuple[int, ...],
        outcome: list[Hypothesis] | TfexportError | None,
    ) -> None:
        if token_ids:
            generation.receive(token_ids)
        if isinstance(outcome, TfexportError):
            self.end(generation, outcome)
        elif outcome is not None and generation.request.config.replace_unknowns:
            compute = partial(_answers, generation, outcome)
            answers = generation.served.alignments.submit(compute)
            answers.add_done_callback(partial(self._take_aligned, generation, outcome))
        elif outcome is not None:
            self._finish(generation, outcome, generation.answers(outcome))
        elif generation.is_behind:
            self.end(generation, Cancelled("the stream was read too slowly; read it as it comes"))

    def _take_aligned(
        self, generation: Generation[Any, Any], hypotheses: list[Hypothesis], answers: asyncio.Future[list[Any]]
    ) -> None:
        error = answers.exception()
        if generation.id not in self._open:
            return
        if isinstance(error, TfexportError):
            self.end(generation, error)
            return
        with self._own_errors(generation):
            self._finish(generation, hypotheses, answers.result())

    def _finish(self, generation: Generation[Any, Any], hypotheses: list[Hypothesis], answers: list[Any]) -> None:
        generation.finish(answers)
        self._close(generation)
        prefix_len = len(generation.request.prompt) - 1 - generation.request.num_forced
        lengths = [len(one.token_ids) - prefix_len for one in hypotheses]
        per_token = (time.monotonic() - generation.began) / (lengths[0] - 1) if lengths[0] > 1 else None
        self._tell(generation, "ok", hypotheses[0].finish_reason, sum(lengths), per_token)

    def _end_late(self, generation: Generation[Any, Any]) -> None:
        if generation.id in self._open:
            self.end(generation, generation.late())

    def _close(self, generation: Generation[Any, Any]) -> None:
        del self._open[generation.id]
        if generation.alarm:
            generation.alarm.cancel()

    @contextlib.contextmanager
    def _own_errors(self, generation: Generation[Any, Any]) -> Iterator[None]:
        """End only this generation if its answer cannot be built."""
        try:
            yield
        except Exception as error:
            logger.exception("an answer could not be put into words")
            self.end(generation, BackendError(f"the answer could not be put into words: {error!r}"))

    def _tell(
        self,
        generation: Generation[Any, Any],
        outcome: Outcome,
        reason: str = "",
        num_tokens: int = 0,
        per_token_s: float | None = None,
    ) -> None:
        self._observer.ended(outcome, reason, time.monotonic() - generation.arrived, num_tokens, per_token_s)


def _answers(generation: Generation[Any, Any], hypotheses: list[Hypothesis]) -> list[Any]:
    return [] if generation.is_done else generation.answers(hypotheses)


def outcome_of(error: BaseException) -> Outcome:
    """Return the outcome of a request that fails with this error."""
    return next((outcome for kind, outcome in _OUTCOMES.items() if isinstance(error, kind)), "error")


def on_loop(loop: asyncio.AbstractEventLoop, method: Callable[[Told], None]) -> Callable[[Told], None]:
    """Return a function that schedules a method on an event loop from any thread.

    It does nothing if the loop is closed or the method's object was deleted.
    """
    call = _weakly(method)

    def post(told: Told) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(call, told)

    return post


def _weakly(method: Callable[[Told], None]) -> Callable[[Told], None]:
    weak = weakref.WeakMethod(method)

    def call(told: Told) -> None:
        if (found := weak()) is not None:
            found(told)

    return call
