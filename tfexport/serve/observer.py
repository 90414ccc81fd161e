"""The interface through which an engine reports its work, for metrics."""

from __future__ import annotations

import functools
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
    """Ignores all events; a subclass counts them. The methods are called from several threads."""

    def joined(self, waited_s: float, source_tokens: int) -> None:
        """Record that a request left the queue and joined a batch."""

    def encoded(self, took_s: float) -> None:
        """Record that the sources of a step were encoded."""

    def stepped(self, took_s: float, num_steps: int, num_rows: int) -> None:
        """Record decoder steps, perhaps several at once, of a batch of `num_rows`."""

    def began(self, took_s: float) -> None:
        """Record the time from the arrival of a request to its first token."""

    def ended(self, outcome: Outcome, reason: str, took_s: float, num_tokens: int, per_token_s: float | None) -> None:
        """Record the end of a request; called once for each, unless `aligned` is.

        Args:
            outcome: how it ended.
            reason: finish reason of an answer, else empty.
            took_s: time since it arrived.
            num_tokens: generated tokens of all its hypotheses.
            per_token_s: mean time of a token after the first, of the best hypothesis; None for one token.
        """

    def aligned(self, took_s: float) -> None:
        """Record the time from the arrival of an alignment to its answer."""


def guarded(observer: Observer) -> Observer:
    """Return an observer that passes events on and logs errors of the other: metrics must not stop serving."""
    safe = Observer()
    for name in ("joined", "encoded", "stepped", "began", "ended", "aligned"):
        setattr(safe, name, _logged(getattr(observer, name)))
    return safe


def _logged(tell: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(tell)
    def told(*values: object) -> None:
        try:
            tell(*values)
        except Exception:
            logger.exception("the observer has failed in %s", tell)

    return told
