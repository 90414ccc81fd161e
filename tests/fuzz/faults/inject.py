"""Faults of the file system, one at a time: the n-th call of a command fails, is its last, or is interrupted.

The command runs in a fork of a process that has loaded everything, so a place takes a fraction of a second.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import ROOT

SOURCE = Path(__file__).with_name("faults.c")
COMMAND = "tests.fuzz.faults.calls:command"
KILL = -1
# What may happen at a call, by name; a number is an errno, see faults.c.
ACTIONS = {
    "ENOSPC": errno.ENOSPC,
    "EIO": errno.EIO,
    "EACCES": errno.EACCES,
    "SIGKILL": KILL,
    "SIGTERM": -1000 - signal.SIGTERM,
    "SIGINT": -1000 - signal.SIGINT,
}


@dataclass(frozen=True)
class Outcome:
    """How a command ended.

    Attributes:
        status: its exit code, or minus the number of the signal that ended it.
        out: what it wrote to standard output.
        said: to standard error.
        calls: names of its calls below the folder, in order.
    """

    status: int
    out: str
    said: str
    calls: list[str]


class Injector:
    """A process that runs commands under faults."""

    def __init__(self, work: Path) -> None:
        """Compile the library that counts, and start the process; `work` is an existing folder of its own."""
        if shutil.which("gcc") is None:
            pytest.skip("gcc is not installed")
        self.work, library = work, work / "faults.so"
        compile_it = ["gcc", "-shared", "-fPIC", "-O1", "-Wall", "-U_FORTIFY_SOURCE", "-o", library, SOURCE, "-ldl"]
        subprocess.run(compile_it, check=True)
        environment = {**os.environ, "LD_PRELOAD": str(library), "TOKENIZERS_PARALLELISM": "false"}
        with (work / "worker").open("w") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.fuzz.faults.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                cwd=ROOT,
                env=environment | {"OMP_NUM_THREADS": "1"},
                text=True,
            )

    def warm(self, call: str, *arguments: object) -> None:
        """Call once in the process itself, so that every fork of it has what that loads."""
        status = self._ask({"warm": True, "call": call, "arguments": [*map(str, arguments)]})
        assert status == 0, (self.work / "worker").read_text()

    def run(self, folder: Path, *arguments: object, at: int = 0, action: str = "EIO", call: str = COMMAND) -> Outcome:
        """Run a command.

        Args:
            folder: only calls below it count; a path without links.
            arguments: of the command line.
            at: number of the call that it happens at, from 1; 0 for none.
            action: one of `ACTIONS`.
            call: "module:function" that takes the arguments.
        """
        request = {"folder": str(folder), "at": at, "action": ACTIONS[action], "work": str(self.work), "call": call}
        status = self._ask({**request, "arguments": [*map(str, arguments)]})
        out, said, calls = ((self.work / name).read_text() for name in ("out", "err", "calls"))
        return Outcome(status, out, said, calls.splitlines())

    def close(self) -> None:
        """End the process."""
        self._process.communicate(timeout=60)

    def _ask(self, request: dict[str, object]) -> int:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, (self.work / "worker").read_text()
        status: int = json.loads(answer)["status"]
        return status
