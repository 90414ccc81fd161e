"""How a model is served."""

from collections.abc import Iterator
from typing import Annotated

from tfexport.config import Config, Ge, Gt, Help, Le

# Longest time limit of a request, and longest delay before its deadline starts.
MAX_S = 86_400


class ServingConfig(Config, subject="serving"):
    """How many requests are decoded at once, how many may wait, and for how long.

    A request takes `num_beams` or `num_return_sequences` of the slots. A burst of requests stalls those that run for
    as long as `encoder_budget` source tokens, padding included, take to encode; one source is always encoded.
    """

    slots: Annotated[int, Ge(1), Le(4096), Help("Rows of each model that are decoded at once.")] = 32
    encoder_budget: Annotated[int, Ge(1), Le(1_000_000), Help("Source tokens that are encoded between two steps.")] = (
        128
    )
    max_waiting: Annotated[int, Ge(1), Le(1_000_000), Help("Requests of each model that may wait.")] = 256
    max_waiting_tokens: Annotated[int, Ge(1), Le(1_000_000_000), Help("Source tokens that may wait.")] = 65_536
    max_num_beams: Annotated[int, Ge(1), Le(64), Help("Most beams of a request.")] = 8
    timeout_s: Annotated[
        float | None, Gt(0), Le(MAX_S), Help("Seconds that a request may take; no limit when not given.")
    ] = None
    stream_buffer: Annotated[
        int, Ge(1), Le(1_000_000), Help("Tokens that a reader may be behind before its request is cancelled.")
    ] = 256
    stall_s: Annotated[
        float, Ge(0.1), Le(3600), Help("Seconds without progress of the engine's thread after which it is not ready.")
    ] = 4.0
    hang_s: Annotated[
        float, Ge(0.1), Le(86_400), Help("Seconds without progress after which the engine counts as dead.")
    ] = 60.0

    def _problems(self) -> Iterator[str]:
        if self.hang_s < self.stall_s:
            yield f"hang_s is {self.hang_s}, below stall_s {self.stall_s}; a thread is silent before it is given up"
