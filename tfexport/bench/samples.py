"""What one process measures of one cell: a few numbers for each call, kept as they come."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, fields
from typing import Any, Self

# Times of steps that are kept; more would show in the memory that is being measured.
MAX_STEPS = 1_000_000


@dataclass(frozen=True)
class Call:
    """One call of the decoder; times are seconds of one clock.

    Attributes:
        began: when it was made.
        first_token: when the first token of its sequences was there.
        ended: when it returned.
        sequences: texts that it was given.
        source_tokens: their tokens, without padding.
        tokens: new tokens of the best hypothesis of each text.
        encode_s: seconds in the encoder.
        reorder_s: seconds in moving rows of the cache.
        step_s: seconds of each step of the decoder.
    """

    began: float
    first_token: float
    ended: float
    sequences: int
    source_tokens: int
    tokens: int
    encode_s: float
    reorder_s: float
    step_s: array[float]


def _doubles() -> array[float]:
    return array("d")


@dataclass
class Samples:
    """All calls of one cell in one process; every array has one entry a request or call unless it says otherwise.

    Attributes:
        first_token_s: from the call, or from the scheduled arrival, to the first token.
        latency_s: likewise to the end.
        per_token_s: mean time of a token after the first.
        encode_s: seconds in the encoder, one a call.
        steps: number of steps, one a call of which the steps are kept.
        step_s: seconds of these steps, one call after the other.
        queue_s: of the server scenario: from when a request was there until it joined a batch.
        waiting: requests without their first token, at equal distances over the run.
        running: requests with their first token that were not whole, likewise.
        windows: what has to be stable: tokens a second of each window, or median latencies in the server scenario.
        elapsed_s: from the first call, or the beginning of the schedule, to the last end.
        busy_s: seconds inside calls, in the server scenario of the run; their parts are `encoding_s`, `stepping_s`,
            `reordering_s` and the rest.
        slot_occupancy: mean share of the slots that a step decoded; None where there are none.
        refused: requests that were.
        unserved: requests that had not been answered when the run was given up.
    """

    first_token_s: array[float] = field(default_factory=_doubles)
    latency_s: array[float] = field(default_factory=_doubles)
    per_token_s: array[float] = field(default_factory=_doubles)
    encode_s: array[float] = field(default_factory=_doubles)
    steps: array[float] = field(default_factory=_doubles)
    step_s: array[float] = field(default_factory=_doubles)
    queue_s: array[float] = field(default_factory=_doubles)
    waiting: array[float] = field(default_factory=_doubles)
    running: array[float] = field(default_factory=_doubles)
    windows: array[float] = field(default_factory=_doubles)
    elapsed_s: float = 0.0
    busy_s: float = 0.0
    encoding_s: float = 0.0
    stepping_s: float = 0.0
    reordering_s: float = 0.0
    calls: int = 0
    sequences: int = 0
    source_tokens: int = 0
    tokens: int = 0
    slot_occupancy: float | None = None
    refused: int = 0
    unserved: int = 0

    def add(self, call: Call) -> None:
        """Note a call, which is one request."""
        self.first_token_s.append(call.first_token - call.began)
        self.latency_s.append(call.ended - call.began)
        if len(call.step_s) > 1:
            self.per_token_s.append((call.ended - call.first_token) / (len(call.step_s) - 1))
        self.encode_s.append(call.encode_s)
        if len(self.step_s) + len(call.step_s) <= MAX_STEPS:
            self.step_s.extend(call.step_s)
            self.steps.append(len(call.step_s))
        self.busy_s += call.ended - call.began
        self.encoding_s += call.encode_s
        self.stepping_s += sum(call.step_s)
        self.reordering_s += call.reorder_s
        self.calls += 1
        self.sequences += call.sequences
        self.source_tokens += call.source_tokens
        self.tokens += call.tokens

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: value.tolist() if isinstance(value, array) else value for name, value in values.items()}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Read what `to_dict` gave."""
        values: dict[str, Any] = {
            name: array("d", value) if isinstance(value, list) else value for name, value in data.items()
        }
        return cls(**values)
