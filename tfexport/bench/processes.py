"""Starting the processes that measure, and ending them whatever happens."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from tfexport import errors
from tfexport.bench.config import BenchConfig
from tfexport.errors import BenchError, TfexportError


def run_process(bundle: Path | None, config: BenchConfig, texts: Sequence[str] | None, number: int) -> dict[str, Any]:
    """Measure once in a process of its own, so that it starts cold and owes nothing to what ran before.

    Args:
        bundle: its directory; None for a server whose bundle is not here.
        config: resolved.
        texts: to decode; None for random sources.
        number: of the process, from 0.

    Returns:
        What `tfexport.bench.worker.measure` found.

    Raises:
        TfexportError: what the process raised.
        BenchError: the process died.
    """
    task = {"bundle": bundle and str(bundle), "config": config.to_dict(), "texts": texts, "number": number}
    code, output, complaint = _communicate(json.dumps(task).encode() + b"\n")
    if code or not output:
        died = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        reason = f" ({complaint})" if complaint else ""
        raise BenchError(f"bench: process {number + 1} {died}{reason}; try a smaller --batch-size, or tfexport doctor")
    found: dict[str, Any] = json.loads(output.rpartition("\n")[2])
    if error := found.get("error"):
        kind = getattr(errors, error["class"], TfexportError)
        raise kind(error["message"])
    return found


def _communicate(task: bytes) -> tuple[int, str, str]:
    """Return exit code, standard output and the last line of standard error.

    Standard input stays open until the end: when it closes, the process knows that nobody waits for it.
    """
    command = [sys.executable, "-P", "-m", "tfexport.bench.worker"]
    with tempfile.TemporaryFile() as complaints:
        process = subprocess.Popen(  # noqa: S603 - our own module, our own interpreter
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=complaints
        )
        with process:
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                _send(process.stdin, task)
                output = process.stdout.read().decode()
                code = process.wait()
            finally:
                process.kill()
        complaints.seek(0)
        lines = complaints.read().decode(errors="replace").strip().splitlines()
    return code, output.strip(), lines[-1] if lines else ""


def _send(stdin: IO[bytes], task: bytes) -> None:
    try:
        stdin.write(task)
        stdin.flush()
    except BrokenPipeError:  # it has died already, and its exit code says how
        with contextlib.suppress(BrokenPipeError):
            stdin.close()  # here, since what is left to write would fail once more later
