"""How a model is served."""

from __future__ import annotations

from collections.abc import Iterator

from tfexport.fields import Config

# What a request may take at most, and count as older than it is.
MAX_S = 86_400


class ServingConfig(Config, subject="serving"):
    """How many requests are decoded at once, how many may wait, and for how long.

    Attributes:
        slots: rows that are decoded at once; a request takes num_beams or num_return_sequences of them.
        encoder_budget: source tokens, padding included, that are encoded between two steps: a burst of requests
            stalls those that run for no longer than that. One source is always encoded.
        max_waiting: requests that wait at most.
        max_waiting_tokens: source tokens that wait at most.
        max_num_beams: of a request.
        timeout_s: seconds that a request takes at most, and takes unless it asks for less; None for no limit.
        stream_buffer: tokens that a reader may be behind before its request is cancelled.
        stall_s: seconds without a sign of life of the engine's thread after which it is not ready.
        hang_s: seconds after which such a thread is given up: the engine does not live any more, and whoever drains or
            replaces it waits no longer.
    """

    slots: int = 32
    encoder_budget: int = 128
    max_waiting: int = 256
    max_waiting_tokens: int = 65_536
    max_num_beams: int = 8
    timeout_s: float | None = None
    stream_buffer: int = 256
    stall_s: float = 4.0
    hang_s: float = 60.0

    def _problems(self) -> Iterator[str]:
        between = {
            "slots": (1, 4096),
            "encoder_budget": (1, 1_000_000),
            "max_waiting": (1, 1_000_000),
            "max_waiting_tokens": (1, 1_000_000_000),
            "max_num_beams": (1, 64),
            "stream_buffer": (1, 1_000_000),
            "stall_s": (0.1, 3600),
            "hang_s": (0.1, 86_400),
        }
        for name, (low, high) in between.items():
            if not low <= (value := getattr(self, name)) <= high:
                yield f"{name} is {value}, expected {low} to {high}"
        if self.hang_s < self.stall_s:
            yield f"hang_s is {self.hang_s}, below stall_s {self.stall_s}; a thread is silent before it is given up"
        if self.timeout_s is not None and not 0 < self.timeout_s <= MAX_S:
            yield f"timeout_s is {self.timeout_s}, expected above 0 and up to {MAX_S}"
