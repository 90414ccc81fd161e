"""What a soak asks: a server, or a model in process, each in a process of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from soaking.asks import Ask, Outcome

BENCHMARKS = Path(__file__).resolve().parent.parent


class Target(Protocol):
    """A process that answers.

    Attributes:
        name: in the report.
        pid: of the process.
        temporary: its folder for temporary files.
        callers: that ask at once.
    """

    name: str
    pid: int
    temporary: Path
    callers: int

    async def ask(self, asks: Sequence[Ask]) -> list[Outcome]:
        """Ask all at once; return what came of each."""
        ...

    async def reload(self) -> None:
        """Have the bundle loaded again, while others ask.

        Raises:
            BenchError: it was not.
        """
        ...

    def disconnect(self) -> None:
        """Close connections that wait for more to be asked."""
        ...

    async def close(self) -> int:
        """End the process; return its exit code."""
        ...


def environment(temporary: Path) -> Mapping[str, str]:
    """Return the environment of a process that is watched; its temporary files are its own."""
    temporary.mkdir()
    paths = [str(BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": os.pathsep.join(paths)}


def python(*arguments: str) -> list[str]:
    """Return the command line of this Python; the folder that it is called in is none to import from."""
    return [sys.executable, "-P", *arguments]
