"""What an engine tells of its work, for metrics; the engine itself knows nothing of who listens."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Literal

logger = logging.getLogger(__name__)

# How a request ended. "invalid" was refused for what it asks, "not_ready" because the bundle was being loaded,
# "slow_reader" cancelled because it was not read.
Outcome = Literal[
    "ok", "invalid", "not_ready", "queue_full", "draining", "deadline", "cancelled", "slow_reader", "error"
]


class Observer:
    """Told of everything, and does nothing; a subclass counts. Its methods are called from several threads."""

    def joined(self, waited_s: float, source_tokens: int) -> None:
        """Hear that a request has left the queue and joins a batch."""

    def encoded(self, took_s: float) -> None:
        """Hear that the sources of a step were encoded."""

    def stepped(self, took_s: float, num_steps: int, num_rows: int) -> None:
        """Hear that decoder steps were taken, several at once perhaps, for so many rows."""

    def began(self, took_s: float) -> None:
        """Hear that a request has its first token, so long after it arrived."""

    def ended(self, outcome: Outcome, reason: str, took_s: float, num_tokens: int, per_token_s: float | None) -> None:
        """Hear that a request is over; every request is, once, here or in `aligned`.

        Args:
            outcome: what became of it.
            reason: its finish reason where it was answered, else empty.
            took_s: since it arrived.
            num_tokens: generated, of all its hypotheses.
            per_token_s: from its first token to its last, for each of the best hypothesis; None for one token.
        """

    def aligned(self, took_s: float) -> None:
        """Hear that an alignment was asked for and is given, so long after that; `ended` tells of others."""


class Guarded(Observer):
    """Tells another observer, whose errors are logged: what measures must not stop what serves."""

    def __init__(self, observer: Observer) -> None:
        """Keep whom to tell."""
        self._observer = observer

    def joined(self, waited_s: float, source_tokens: int) -> None:
        """Pass it on."""
        self._tell(self._observer.joined, waited_s, source_tokens)

    def encoded(self, took_s: float) -> None:
        """Pass it on."""
        self._tell(self._observer.encoded, took_s)

    def stepped(self, took_s: float, num_steps: int, num_rows: int) -> None:
        """Pass it on."""
        self._tell(self._observer.stepped, took_s, num_steps, num_rows)

    def began(self, took_s: float) -> None:
        """Pass it on."""
        self._tell(self._observer.began, took_s)

    def ended(self, outcome: Outcome, reason: str, took_s: float, num_tokens: int, per_token_s: float | None) -> None:
        """Pass it on."""
        self._tell(self._observer.ended, outcome, reason, took_s, num_tokens, per_token_s)

    def aligned(self, took_s: float) -> None:
        """Pass it on."""
        self._tell(self._observer.aligned, took_s)

    def _tell(self, tell: Callable[..., None], *values: object) -> None:
        try:
            tell(*values)
        except Exception:
            logger.exception("the observer has failed in %s", tell)
