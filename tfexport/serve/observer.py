"""Define the interface that receives an engine's measurements."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Literal

logger = logging.getLogger(__name__)
# "not_ready": the bundle was still loading. "slow_reader": the client did not read its stream.
Outcome = Literal[
    "ok", "invalid", "not_ready", "queue_full", "draining", "deadline", "cancelled", "slow_reader", "error"
]


class Observer:
    """Ignore all events; override methods, which several threads call."""

    def joined(self, waited_s: float, source_tokens: int) -> None:
        """Record that a request left the queue and joined a batch."""

    def encoded(self, took_s: float) -> None:
        """Record that the sources of a step were encoded."""

    def stepped(self, took_s: float, num_steps: int, num_rows: int) -> None:
        """Record the total time of `num_steps` decoder steps of a batch."""

    def began(self, took_s: float) -> None:
        """Record the time from the arrival of a request to its first token."""

    def ended(self, outcome: Outcome, reason: str, took_s: float, num_tokens: int, per_token_s: float | None) -> None:
        """Record the end of a request; a successful alignment calls `aligned` instead.

        `reason` is the finish reason, or empty without an answer. `num_tokens` counts the generated tokens of all
        hypotheses. `per_token_s` is the mean time per token after the first of the best hypothesis, if it has several.
        """

    def aligned(self, took_s: float) -> None:
        """Record the time from the arrival of an alignment to its answer."""


def guarded(observer: Observer) -> Observer:
    """Return an observer that forwards events and logs exceptions."""
    safe = Observer()
    for name in ("joined", "encoded", "stepped", "began", "ended", "aligned"):
        setattr(safe, name, functools.partial(_logged, getattr(observer, name)))
    return safe


def _logged(record: Callable[..., None], *values: object) -> None:
    try:
        record(*values)
    except Exception:
        logger.exception("the observer failed in %s", record)
