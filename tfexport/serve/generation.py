"""One request of a caller, from its submission to its answer."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from tfexport.decode.alternatives import alternatives
from tfexport.decode.pieces import Pieces
from tfexport.decode.request import Request, Status
from tfexport.decode.result import Hypothesis
from tfexport.errors import Cancelled, DeadlineExceeded, TfexportError
from tfexport.generation import DecodeConfig
from tfexport.runtime.session import Session

Item = TypeVar("Item")
Answer = TypeVar("Answer")
_ids = itertools.count()


class Generation(Generic[Item, Answer]):
    """One text to decode: await it for its answers, iterate over it for what comes, or `cancel` it.

    Its caller uses it on the event loop that it was submitted on; the thread of the engine decodes its parts.
    Times are those of `time.monotonic`, in seconds.

    Attributes:
        id: unique in this process.
        status: RUNNING after it left the queue; DONE after it was answered, failed or cancelled. CANCELLED tells the
            thread to drop it before the next step.
        request: what is decoded, checked.
        arrived: when it was submitted.
        priority: seconds that it counts as older than it is.
        deadline: when it has to be answered; inf for never.
        answers: makes the answers of all hypotheses, on any thread.
        served: the `Served` model that decodes it.
        alarm: ends it at its deadline.
        parts: requests that are decoded for it, one a sample or alternative.
        found: hypotheses of each finished part by its number.
        joined: when it left the queue.
        began: when it had its first token.
    """

    served: Any

    def __init__(
        self,
        request: Request,
        arrived: float,
        priority: float = 0.0,
        deadline: float = math.inf,
        *,
        answers: Callable[[Sequence[Hypothesis]], list[Any]] = list,
        pieces: Pieces | None = None,
        buffer: int = 0,
        leave: Callable[[Generation[Any, Any], TfexportError], None] | None = None,
    ) -> None:
        """Start to wait.

        Args:
            request: see the attributes, as for the next four.
            arrived: time of the submission.
            priority: in seconds.
            deadline: time of the deadline.
            answers: makes the answers.
            pieces: turns tokens into text for a stream of text; None streams token ids.
            buffer: items that the reader of a stream may be behind.
            leave: ends the generation in its engine.
        """
        self.id, self.status = next(_ids), Status.WAITING
        self.request, self.arrived, self.priority, self.deadline = request, arrived, priority, deadline
        self.answers, self._pieces, self._buffer, self._leave = answers, pieces, buffer, leave
        self.alarm: asyncio.TimerHandle | None = None
        self.parts: list[Request] = []
        self.found: dict[int, list[Hypothesis]] = {}
        self.joined = self.began = math.nan
        self._unread: deque[Item] = deque()
        self._outcome: list[Answer] | TfexportError | None = None
        self._changed = asyncio.Event()

    @property
    def width(self) -> int:
        """Rows of each part."""
        return self.request.config.num_beams

    @property
    def num_sources(self) -> int:
        """Times that the source is encoded: once for each part, and once to find alternatives."""
        return num_parts(self.request.config) + self.request.config.return_alternatives

    @property
    def num_rows(self) -> int:
        """Slots that it takes."""
        return num_rows(self.request.config)

    @property
    def source_length(self) -> int:
        """Tokens of the source."""
        return len(self.request.source_ids)

    @property
    def is_done(self) -> bool:
        """Whether it is answered, failed or cancelled."""
        return self._outcome is not None

    @property
    def is_behind(self) -> bool:
        """Whether more is unread than the buffer holds."""
        return len(self._unread) > self._buffer

    def cancel(self) -> None:
        """Cancel the request; awaiting it raises `Cancelled`. Does nothing if it is done."""
        if not self.is_done and self._leave:
            self._leave(self, Cancelled("the request was cancelled"))

    def __await__(self) -> Generator[None, None, list[Answer]]:
        """Wait for the answers, best first; the request is cancelled if the waiting task is."""
        return self._wait().__await__()

    async def __aiter__(self) -> AsyncIterator[Item]:
        """Yield what comes; the request is cancelled if the reader leaves early."""
        try:
            while await self._has_more():
                yield self._unread.popleft()
        finally:
            self.cancel()

    async def together(self) -> AsyncIterator[list[Item]]:
        """Yield all unread items at once; the request is cancelled if the reader leaves early."""
        try:
            while await self._has_more():
                items = list(self._unread)
                self._unread.clear()
                yield items
        finally:
            self.cancel()

    # ---- for the thread of the engine

    def late(self) -> DeadlineExceeded:
        """Return the error after the deadline."""
        when = "before it began" if math.isnan(self.joined) else "while it was decoded"
        allowed = self.deadline - self.arrived
        return DeadlineExceeded(f"the {allowed:.3g} s of the request were over {when}; allow more, or come again later")

    def expand(self, session: Session) -> None:
        """Fill `parts`.

        Raises:
            InputError: its filters leave no alternative.
            BackendError: the backend failed on its alternatives.
        """
        config = self.request.config
        if config.return_alternatives:
            self.parts = alternatives(session, [self.request], 1)
        elif config.do_sample:
            samples = range(config.num_return_sequences)
            self.parts = [dataclasses.replace(self.request, sample=sample) for sample in samples]
        else:
            self.parts = [self.request]

    def take(self, part: Request, hypotheses: list[Hypothesis]) -> list[Hypothesis] | None:
        """Take the hypotheses of a part; return all, best first, after the last part."""
        self.found[part.sample] = hypotheses
        if len(self.found) < len(self.parts):
            return None
        return [best for sample in sorted(self.found) for best in self.found[sample]]

    # ---- for the engine, on the event loop

    def begin(self) -> None:
        """Hand out the prefix, which does not count for the buffer."""
        if self.request.stream:
            self.receive(self.request.prompt[1:])
            self._buffer += len(self._unread)

    def receive(self, token_ids: Sequence[int]) -> None:
        """Take new tokens of a stream."""
        push = self._pieces.push if self._pieces else None
        self._unread.extend(filter(None, map(push, token_ids)) if push else token_ids)  # type: ignore[arg-type]
        self._changed.set()

    def finish(self, outcome: list[Answer] | TfexportError) -> None:
        """Take the end: answers, or an error."""
        if not isinstance(outcome, TfexportError) and self._pieces and (rest := self._pieces.rest()):
            self._unread.append(rest)  # type: ignore[arg-type]
        self._outcome = outcome
        if self.status is not Status.CANCELLED:
            self.status = Status.DONE
        self._changed.set()

    async def _has_more(self) -> bool:
        """Wait until something is unread or the request is done; raise its error after all was read."""
        while not self._unread:
            if isinstance(self._outcome, TfexportError):
                raise self._outcome
            if self.is_done:
                return False
            self._changed.clear()
            await self._changed.wait()
        return True

    async def _wait(self) -> list[Answer]:
        try:
            while self._outcome is None:
                self._changed.clear()
                await self._changed.wait()
        finally:
            self.cancel()
        if isinstance(self._outcome, TfexportError):
            raise self._outcome
        return self._outcome


class Event(NamedTuple):
    """What a step has brought a generation.

    Attributes:
        generation: as it was submitted.
        token_ids: new tokens of a stream.
        outcome: hypotheses, best first, or an error; None while it goes on.
    """

    generation: Generation[Any, Any]
    token_ids: tuple[int, ...] = ()
    outcome: list[Hypothesis] | TfexportError | None = None


def num_parts(config: DecodeConfig) -> int:
    """Return how many requests are decoded for one text."""
    return config.num_return_sequences if config.do_sample or config.return_alternatives else 1


def num_rows(config: DecodeConfig) -> int:
    """Return how many slots one text takes."""
    return config.num_beams * num_parts(config)
