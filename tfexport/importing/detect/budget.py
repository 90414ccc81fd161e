"""How much a search may run: counted in candidates, so that it is the same on every machine, busy or not."""

from __future__ import annotations

from collections.abc import Callable

# What an import may run; the most that a recorded model is known to need is a quarter of it.
CANDIDATES = 20_000
_LINES = 10


class Budget:
    """Counts candidates: a mapping of the keys with a value of every switch, run once; `spent` of at most `limit`."""

    def __init__(
        self,
        limit: int,
        report: Callable[[str], None] = lambda _: None,
        on_progress: Callable[[float], None] = lambda _: None,
    ) -> None:
        """Start to count.

        Args:
            limit: candidates that may be run.
            report: receives a line for every tenth of them.
            on_progress: receives the share that was run, from 0 to 1, after each.
        """
        self.limit, self.spent = limit, 0
        self._report, self._on_progress = report, on_progress

    @property
    def is_over(self) -> bool:
        """Whether no further candidate may be run."""
        return self.spent >= self.limit

    def spend(self) -> None:
        """Count a candidate."""
        self.spent += 1
        self._on_progress(min(self.spent / self.limit, 1.0))
        if self.spent * _LINES // self.limit > (self.spent - 1) * _LINES // self.limit and not self.is_over:
            self._report(f"searching: {self.spent:,} of {self.limit:,} candidates")
