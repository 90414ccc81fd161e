"""A request under way, as its caller sees it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from typing import Generic, Protocol, TypeVar

from tfexport.decode.pieces import Pieces
from tfexport.decode.result import Hypothesis
from tfexport.errors import Cancelled, TfexportError
from tfexport.serve.job import Job

Item = TypeVar("Item")
Item_co = TypeVar("Item_co", covariant=True)
Answer = TypeVar("Answer")


class Tokens(Protocol[Item_co]):
    """Turns tokens into what a stream hands out."""

    def push(self, token: int) -> Item_co | None:
        """Take a token; return what may be handed out, or nothing."""
        ...

    def rest(self) -> Item_co | None:
        """Return what is left at the end, or nothing."""
        ...


class Ids:
    """Hands out tokens as they are; see `Tokens`."""

    def push(self, token: int) -> int | None:
        """Return the token."""
        return token

    def rest(self) -> int | None:
        """Return nothing."""
        return None


class Texts:
    """Hands out pieces of the text; see `Tokens`."""

    def __init__(self, pieces: Pieces) -> None:
        """Take what decodes the tokens."""
        self._pieces = pieces

    def push(self, token: int) -> str | None:
        """Return what the token adds to the text, nothing while a character is incomplete."""
        return self._pieces.push(token) or None

    def rest(self) -> str | None:
        """Return what is left of the text."""
        return self._pieces.rest() or None


class Generation(Generic[Item, Answer]):
    """One request under way: await it for its answers, iterate over it for what comes, `cancel` it.

    It belongs to the event loop that it was submitted on.

    Attributes:
        job: that the engine decodes.
        answers: makes the answers of all hypotheses.
    """

    def __init__(
        self,
        job: Job,
        answers: Callable[[Sequence[Hypothesis]], list[Answer]],
        tokens: Tokens[Item] | None,
        buffer: int,
        leave: Callable[[Generation[Item, Answer], TfexportError], None],
    ) -> None:
        """Begin to wait.

        Args:
            job: that the engine decodes.
            answers: makes the answers of all hypotheses; it may be called on another thread.
            tokens: of a stream; None where nothing is handed out before the end.
            buffer: items that the reader may be behind.
            leave: ends the generation and tells the engine.
        """
        self.job = job
        self.answers, self._tokens, self._buffer, self._leave = answers, tokens, buffer, leave
        self._unread: deque[Item] = deque()
        self._outcome: list[Answer] | TfexportError | None = None
        self._changed = asyncio.Event()

    @property
    def is_done(self) -> bool:
        """Whether it is answered, failed or cancelled."""
        return self._outcome is not None

    @property
    def is_behind(self) -> bool:
        """Whether more is unread than the buffer holds."""
        return len(self._unread) > self._buffer

    def cancel(self) -> None:
        """Let the request leave; whoever awaits it gets `Cancelled`. Nothing happens once it is done."""
        if not self.is_done:
            self._leave(self, Cancelled("the request was cancelled"))

    def __await__(self) -> Generator[None, None, list[Answer]]:
        """Wait for the answers, best first; the request is cancelled where the waiting task is."""
        return self._wait().__await__()

    async def __aiter__(self) -> AsyncIterator[Item]:
        """Hand out what comes; the request is cancelled where the reader leaves early."""
        try:
            while await self._has_more():
                yield self._unread.popleft()
        finally:
            self.cancel()

    async def together(self) -> AsyncIterator[list[Item]]:
        """Hand out what comes, all that is unread at once; the request is cancelled where the reader leaves early."""
        try:
            while await self._has_more():
                items = list(self._unread)
                self._unread.clear()
                yield items
        finally:
            self.cancel()

    def begin(self) -> None:
        """Hand out what the answer begins with, which the reader may be behind beside the buffer."""
        if self._tokens:
            self.receive(self.job.request.prompt[1:])
            self._buffer += len(self._unread)

    def receive(self, token_ids: Sequence[int]) -> None:
        """Take new tokens from the engine."""
        assert self._tokens
        items = map(self._tokens.push, token_ids)
        self._unread.extend(item for item in items if item is not None)
        self._changed.set()

    def finish(self, outcome: list[Answer] | TfexportError) -> None:
        """Take the end from the engine: answers, or what was wrong."""
        if not isinstance(outcome, TfexportError) and self._tokens and (rest := self._tokens.rest()) is not None:
            self._unread.append(rest)
        self._outcome = outcome
        self._changed.set()

    async def _has_more(self) -> bool:
        """Wait until something is unread, or all was read; raise what was wrong once all was read."""
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
