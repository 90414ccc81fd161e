"""A system under load: what its environment loads once, and is asked for in several ways.

Standard library alone. Requests beside those of `comparison.workers.protocol`:

    {"op": "load", "folder", "precision", "threads"}                 → {"versions"}
    {"op": "answer", "policy", "sources", "arrivals", "limit_s"}     → {"wall_s", "cpu_s", "latencies_s", "outputs"}
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

from comparison.workers.load import Ids, Ledger, run


class Loaded(Protocol):
    """A system that decodes batches whose texts end by themselves."""

    libraries: tuple[str, ...]

    def load(self, folder: Path, precision: str, threads: int) -> None:
        """Load a model; `threads` compute one batch."""

    def decode(self, sources: list[Ids]) -> list[Ids]:
        """Decode a batch greedily, each text to its end; called from several threads."""


class LoadServer:
    """Answers requests for one system."""

    def __init__(self, system: Loaded) -> None:
        """Begin with nothing loaded."""
        self.system = system

    def load(self, folder: str, precision: str, threads: int) -> dict[str, Any]:
        """Load the model."""
        self.system.load(Path(folder), precision, threads)
        return {"versions": {name: version(name) for name in self.system.libraries}}

    def answer(
        self, policy: str, sources: Sequence[Ids], arrivals: Sequence[float] | None, limit_s: float
    ) -> dict[str, Any]:
        """Answer all requests as a policy puts them together."""
        return run(policy, self.system.decode, sources, Ledger(arrivals, len(sources), limit_s))
