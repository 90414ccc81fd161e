"""One request of a caller, from its arrival to its answer."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field

from tfexport.decode.alternatives import alternatives
from tfexport.decode.request import Request
from tfexport.decode.result import Hypothesis
from tfexport.errors import DeadlineExceeded, TfexportError
from tfexport.generation import DecodeConfig
from tfexport.runtime.session import Session


@dataclass(eq=False)
class Job:
    """What a caller waits for: one text, with one or several hypotheses.

    Times are those of `time.monotonic`, in seconds.

    Attributes:
        request: that was checked.
        arrived: when it was submitted.
        priority: seconds that it counts as older than it is; what waits is served in the order of age.
        deadline: when it has to be answered; inf for never.
        is_cancelled: set by its caller, or where its deadline is over; it leaves before the next step.
        parts: requests that are decoded for it, one a sample or alternative.
        found: hypotheses of each part that is done, by its number.
        joined: when it left the queue.
        began: when it had its first token.
    """

    request: Request
    arrived: float
    priority: float = 0.0
    deadline: float = math.inf
    is_cancelled: bool = False
    parts: list[Request] = field(default_factory=list)
    found: dict[int, list[Hypothesis]] = field(default_factory=dict)
    joined: float = math.nan
    began: float = math.nan

    @property
    def width(self) -> int:
        """Rows of each part."""
        return self.request.config.num_beams

    @property
    def num_sources(self) -> int:
        """Times that its source is encoded: once for each part, and once to find alternatives."""
        return num_parts(self.request.config) + self.request.config.return_alternatives

    @property
    def num_rows(self) -> int:
        """Slots that it takes."""
        return num_rows(self.request.config)

    @property
    def source_length(self) -> int:
        """Tokens of the source."""
        return len(self.request.source_ids)

    def late(self) -> DeadlineExceeded:
        """Return the error for a job whose deadline has passed."""
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
        """Keep what came of a part; return all hypotheses, best first, when it was the last one."""
        self.found[part.sample] = hypotheses
        if len(self.found) < len(self.parts):
            return None
        return [best for sample in sorted(self.found) for best in self.found[sample]]


def num_parts(config: DecodeConfig) -> int:
    """Return how many requests are decoded for one text."""
    return config.num_return_sequences if config.do_sample or config.return_alternatives else 1


def num_rows(config: DecodeConfig) -> int:
    """Return how many slots one text takes."""
    return config.num_beams * num_parts(config)


@dataclass(frozen=True)
class Event:
    """What a step has brought a job.

    Attributes:
        job: the caller's.
        token_ids: new ones, where it streams.
        outcome: hypotheses, best first, or what was wrong; None while it goes on.
    """

    job: Job
    token_ids: tuple[int, ...] = ()
    outcome: list[Hypothesis] | TfexportError | None = None
