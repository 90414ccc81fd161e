"""Represent one request from its submission to its answers."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

from tfexport.decode.offline import alternatives, with_languages
from tfexport.decode.request import Request, Status
from tfexport.decode.result import Hypothesis
from tfexport.decode.stops import Pieces
from tfexport.errors import Cancelled, DeadlineExceeded, TfexportError
from tfexport.generation import DecodeConfig
from tfexport.runtime.session import Session

Item = TypeVar("Item")
Answer = TypeVar("Answer")


@dataclass(eq=False)
class Generation(Generic[Item, Answer]):
    """A submitted request: await it, iterate over its stream, or `cancel` it.

    The caller uses it on the event loop that submitted it; the engine's thread decodes its parts. All times are seconds
    of `time.monotonic`.
    """

    request: Request
    arrived: float
    priority: float = 0.0  # seconds that are added to its age in the queue
    deadline: float = math.inf
    _: KW_ONLY
    answers: Callable[[Sequence[Hypothesis]], list[Any]] = list  # called on any thread
    pieces: Pieces | None = None  # converts the token ids of a stream to text
    buffer: int = 0  # maximum number of unread items
    leave: Callable[[AnyGeneration, TfexportError], None] | None = None  # removes it from its engine

    def __post_init__(self) -> None:
        config = self.request.config
        self.status = Status.WAITING  # if it is CANCELLED, the thread drops it before the next step
        self.width, self.source_length = config.num_beams, self.request.source_length
        # Finding the language or the alternatives encodes the source too.
        self.is_encoded_before = config.return_alternatives or self.request.lacks_language
        self.num_sources, self.num_rows = num_parts(config) + self.is_encoded_before, num_rows(config)
        self.streams_later = self.request.stream and self.request.lacks_language  # the prompt, from the thread
        self.parts: list[Request] = []  # one for each sample or alternative
        self._hypotheses: dict[int, list[Hypothesis]] = {}  # of finished parts, by sample number
        self.joined = self.began = math.nan  # times when it left the queue, and of its first token
        self._unread: deque[Item] = deque()
        self._outcome: list[Answer] | TfexportError | None = None
        self._changed = asyncio.Event()

    @property
    def is_done(self) -> bool:
        return self._outcome is not None

    @property
    def is_behind(self) -> bool:
        return len(self._unread) > self.buffer

    def cancel(self) -> None:
        """Cancel the request if it is not done; awaiting it then raises `Cancelled`."""
        if not self.is_done and self.leave:
            self.leave(self, Cancelled("the request was cancelled"))

    def __await__(self) -> Generator[None, None, list[Answer]]:
        """Wait for the answers, best first; cancel the request with the task."""
        return self._wait().__await__()

    async def __aiter__(self) -> AsyncIterator[Item]:
        """Yield stream items; cancel the request if the reader stops early."""
        try:
            while await self._has_more():
                yield self._unread.popleft()
        finally:
            self.cancel()

    async def together(self) -> AsyncIterator[list[Item]]:
        """Yield lists of unread items; cancel the request if the reader stops."""
        try:
            while await self._has_more():
                items = list(self._unread)
                self._unread.clear()
                yield items
        finally:
            self.cancel()

    # ---- called on the engine's thread

    def late(self) -> DeadlineExceeded:
        when = "before decoding began" if math.isnan(self.joined) else "while decoding"
        limit_s = self.deadline - self.arrived
        return DeadlineExceeded(f"the time limit of {limit_s:.3g} s was exceeded {when}; raise it, or try again later")

    def expand(self, session: Session) -> None:
        """Split the request into `parts`, after finding its language and alternatives."""
        (self.request,) = with_languages(session, [self.request], 1)
        config = self.request.config
        if config.return_alternatives:
            self.parts = alternatives(session, [self.request], 1)
        elif config.do_sample:
            samples = range(config.num_return_sequences)
            self.parts = [replace(self.request, sample=sample) for sample in samples]
        else:
            self.parts = [self.request]

    def take(self, part: Request, hypotheses: list[Hypothesis]) -> list[Hypothesis] | None:
        """Store a part's hypotheses; after the last part, return all, best first."""
        self._hypotheses[part.sample] = hypotheses
        if len(self._hypotheses) < len(self.parts):
            return None
        return [best for sample in sorted(self._hypotheses) for best in self._hypotheses[sample]]

    # ---- called by the engine on the event loop

    def read(self, request: Request) -> None:
        """Replace the request, whose source was a stand-in until it was read."""
        self.request, self.source_length = request, request.source_length

    def begin(self) -> None:
        """Stream the prefix, which does not count toward the buffer limit."""
        if self.request.stream and not self.streams_later:
            self.receive(self.request.prompt[1:])
            self.buffer += len(self._unread)

    def receive(self, token_ids: Sequence[int]) -> None:
        push = self.pieces.push if self.pieces else None
        self._unread.extend(filter(None, map(push, token_ids)) if push else token_ids)  # type: ignore[arg-type]
        self._changed.set()

    def finish(self, outcome: list[Answer] | TfexportError) -> None:
        if not isinstance(outcome, TfexportError) and self.pieces and (rest := self.pieces.rest()):
            self._unread.append(rest)  # type: ignore[arg-type]
        self._outcome = outcome
        if self.status is not Status.CANCELLED:
            self.status = Status.DONE
        self._changed.set()

    async def _has_more(self) -> bool:
        while not self._unread:
            if isinstance(self._outcome, TfexportError):
                raise self._outcome
            if self.is_done:
                return False
            await self._change()
        return True

    async def _wait(self) -> list[Answer]:
        try:
            while self._outcome is None:
                await self._change()
        finally:
            self.cancel()
        if isinstance(self._outcome, TfexportError):
            raise self._outcome
        return self._outcome

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()


AnyGeneration: TypeAlias = Generation[Any, Any]


class Event(NamedTuple):
    """New stream tokens of a generation, and its outcome if it ended."""

    generation: AnyGeneration
    token_ids: tuple[int, ...] = ()
    outcome: list[Hypothesis] | TfexportError | None = None


def num_parts(config: DecodeConfig) -> int:
    return config.num_return_sequences if config.do_sample or config.return_alternatives else 1


def num_rows(config: DecodeConfig) -> int:
    return config.num_beams * num_parts(config)
