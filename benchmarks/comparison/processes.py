"""A worker process: requests go to it and answers come back as lines of JSON."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from comparison.systems import SYSTEMS
from tfexport.errors import BenchError

BENCHMARKS = Path(__file__).resolve().parent.parent


class Worker:
    """One process of one system.

    Attributes:
        name: for messages.
    """

    def __init__(self, name: str, python: Path, module: str) -> None:
        """Start the process.

        Args:
            name: for messages.
            python: of the system's environment.
            module: that speaks `comparison.workers.protocol`.

        Raises:
            BenchError: there is no such Python.
        """
        self.name = name
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        try:
            self._process = subprocess.Popen(
                [str(python), "-P", "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._complaints,
                env=environment(),
            )
        except OSError as error:
            self._complaints.close()
            raise BenchError(
                f"{name}: no Python at {python} ({error.strerror}); run benchmarks/environments or give --python"
            ) from error

    def ask(self, op: str, **values: Any) -> dict[str, Any]:
        """Send a request and wait for its answer.

        Args:
            op: of the protocol.
            values: its arguments, JSON values.

        Raises:
            BenchError: the request failed, or the process died.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"op": op, **values}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has died, which the answer that does not come says
        line = self._process.stdout.readline()
        if not line.endswith(b"\n"):
            raise BenchError(f"{self.name}: {self._death(op)}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise BenchError(f"{self.name}: {op} failed: {answer['error']}")
        return answer

    def kill(self) -> None:
        """End the process while another thread may be asking it, which is then told."""
        self._process.kill()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
        self._complaints.close()

    def __enter__(self) -> Self:
        """Return the worker itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the process."""
        self.close()

    def _death(self, op: str) -> str:
        code = self._process.wait()
        self._complaints.seek(0)
        lines = self._complaints.read().decode(errors="replace").strip().splitlines()
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return f"the process {how} during {op}" + (f" ({lines[-1]})" if lines else "")


def start(name: str, system: str, python: Path) -> Worker:
    """Start the worker of a system in its environment.

    Raises:
        BenchError: there is no such Python.
    """
    return Worker(name, python, SYSTEMS[system].module)


def environment() -> dict[str, str]:
    """Return the environment of a worker: ours, and this folder to import from."""
    paths = [str(BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
