"""How much of several builds is done, from what the library says of one phase after the other."""

from __future__ import annotations

from collections.abc import Callable


class Gauge:
    """Turns the phases of each build, which lie in one another, into one number that never falls."""

    def __init__(self, builds: int, show: Callable[[float], None]) -> None:
        """Show the part that is done, 0 to 1, of so many builds."""
        self._builds = builds
        self._show = show
        self._finished = 0
        self._done = 0.0
        self._open: list[tuple[str, int, int]] = []

    def tell(self, phase: str, step: int, total: int) -> None:
        """Take a step of a phase; step 0 begins one within those that are open."""
        if step == 0:
            self._open.append((phase, 0, total))
            return
        names = [name for name, _, _ in self._open]
        if phase not in names:
            return
        while self._open[-1][0] != phase:
            self._open.pop()
        self._open[-1] = (phase, step, total)
        part = 0.0
        for _, reached, steps in reversed(self._open):
            part = min(1.0, (reached + part) / steps) if steps else 0.0
        self._advance(self._finished + part)

    def finish_build(self) -> None:
        """Count a build as done."""
        self._open.clear()
        self._finished += 1
        self._advance(self._finished)

    def _advance(self, builds: float) -> None:
        self._done = max(self._done, builds / self._builds)
        self._show(self._done)
