"""What a worker answers: requests and answers are lines of JSON on standard input and output.

Standard library alone, since every system's environment runs it. Requests:

    {"op": "convert", "weights", "target", "precision"}            → {}
    {"op": "load", "folder", "precision", "threads"}               → {"import_s", "load_s", "versions"}
    {"op": "call", "sources", "num_beams", "new_tokens"}           → {"seconds", "outputs"}
    {"op": "time"}                                                 → {"seconds"}
    {"op": "peak"}                                                 → {"bytes"}

`call` chooses what `time` runs once more: who asks decides how often that is, and what counts. A request that fails is
answered with {"error": one line}; the end of standard input ends the worker.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

Sources = Sequence[Sequence[int]]
Call = Callable[[], Any]


class System(ABC):
    """One system: how it takes weights over, loads them and decodes."""

    libraries: tuple[str, ...]

    @abstractmethod
    def convert(self, weights: Path, target: Path, precision: str) -> None:
        """Write the model directory `weights` to `target`, which does not exist, in the form that `load` reads."""

    @abstractmethod
    def import_library(self) -> None:
        """Import what `load` needs, so that its time is known by itself."""

    @abstractmethod
    def load(self, folder: Path, precision: str, threads: int | None) -> None:
        """Load what `convert` wrote; None is the system's own number of threads."""

    @abstractmethod
    def call(self, sources: Sources, num_beams: int, new_tokens: int) -> Call:
        """Return the call that is timed: it decodes exactly `new_tokens` tokens for each of `sources`."""

    @abstractmethod
    def tokens(self, found: Any) -> list[list[int]]:
        """Return the best hypothesis of each source, without start and end, from what the call returned."""


class Server:
    """Answers requests for one system."""

    def __init__(self, system: System) -> None:
        """Begin with nothing loaded."""
        self.system = system
        self.timed: Call | None = None

    def convert(self, weights: str, target: str, precision: str) -> dict[str, Any]:
        """Write the system's own form of a model directory."""
        self.system.convert(Path(weights), Path(target), precision)
        return {}

    def load(self, folder: str, precision: str, threads: int | None) -> dict[str, Any]:
        """Import the library and load the model, each timed."""
        import_s, _ = clock(self.system.import_library)
        load_s, _ = clock(lambda: self.system.load(Path(folder), precision, threads))
        versions = {name: version(name) for name in self.system.libraries}
        return {"import_s": import_s, "load_s": load_s, "versions": versions}

    def call(self, sources: Sources, num_beams: int, new_tokens: int) -> dict[str, Any]:
        """Decode once, and keep the call for `time`."""
        self.timed = self.system.call(sources, num_beams, new_tokens)
        seconds, found = clock(self.timed)
        return {"seconds": seconds, "outputs": self.system.tokens(found)}

    def time(self) -> dict[str, Any]:
        """Decode once more."""
        assert self.timed is not None, "call comes before time"
        return {"seconds": clock(self.timed)[0]}

    def peak(self) -> dict[str, Any]:
        """Return the most memory that this process has held."""
        status = Path("/proc/self/status")
        if status.exists():
            # On Linux getrusage would tell the peak of whoever started this process, when that was higher.
            lines = status.read_text(encoding="ascii").splitlines()
            return {"bytes": next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))}
        return {"bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}  # bytes on macOS


def clock(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds that a call takes and what it returns."""
    began = time.perf_counter()
    found = call()
    return time.perf_counter() - began, found


def serve(system: System) -> None:
    """Answer requests for one system until standard input ends."""
    answer_requests(Server(system))


def answer_requests(server: object) -> None:
    """Answer requests by the methods of their names until standard input ends."""
    # What libraries print goes to standard error: standard output is for answers alone.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = getattr(server, request.pop("op"))(**request)
        except Exception as error:  # noqa: BLE001 - whatever a system raises is an answer
            answer = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
