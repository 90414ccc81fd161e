"""Call a function in a subprocess with limits of memory and time."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from typing import Any

from tfexport import errors
from tfexport.errors import TfexportError

if sys.platform != "win32":
    import resource

# macOS accepts a limit of memory and ignores it; Windows limits only the time.
LIMITS_MEMORY = sys.platform not in ("darwin", "win32")
_MAX_FILES = 64


class ProcessError(Exception):
    """A process ended without a result; the message is the reason."""


def call_in_process(
    function: str,
    *arguments: Any,
    wall_s: float,
    memory_bytes: int | None = None,
    cpu_s: int | None = None,
    data: bytes | None = None,
) -> Any:
    """Call a function, "module:name", in a new Python process and return its result.

    Arguments and result are JSON values, except `data`, the last argument. With a memory limit, which counts the
    address space, the process cannot write files and can open only a few. A crash or a limit raises ProcessError.
    Check `LIMITS_MEMORY` first if the limits protect from untrusted input: other systems only limit the wall time.
    """
    request = {"function": function, "arguments": arguments, "memory": memory_bytes, "cpu": cpu_s}
    try:
        done = subprocess.run(  # noqa: S603 - our own module, our own interpreter
            [sys.executable, "-P", "-m", __name__, json.dumps(request | {"has_data": data is not None})],
            input=data or b"",
            # Each OpenBLAS thread allocates memory, which is limited.
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "RUST_BACKTRACE": "0"},
            capture_output=True,
            timeout=wall_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ProcessError(f"takes more than {wall_s:g} s") from error
    except OSError as error:
        raise ProcessError(f"cannot be started ({error}), free memory or processes") from error
    if done.returncode:
        raise ProcessError(_reason(done.returncode, done.stderr.decode(errors="replace"), memory_bytes, cpu_s))
    found: dict[str, Any] = json.loads(done.stdout.rpartition(b"\n")[2])
    if "error" in found:
        kind: type[TfexportError] = getattr(errors, found.pop("error"), TfexportError)
        raise kind(*found.pop("problems"), **found)
    return found["result"]


def _reason(code: int, stderr: str, memory_bytes: int | None, cpu_s: int | None) -> str:
    if "memory allocation" in stderr or "MemoryError" in stderr:
        return f"needs more than {memory_bytes} bytes of memory"
    if code == -getattr(signal, "SIGXCPU", 0) or (code == -getattr(signal, "SIGKILL", 0) and cpu_s is not None):
        return f"takes more than {cpu_s} s of CPU time"
    if code < 0:
        return f"was ended by signal {-code}"
    return f"failed ({(stderr.strip().splitlines() or ['no reason given'])[-1]})"


def _main() -> None:
    request = json.loads(sys.argv[1])
    data = [sys.stdin.buffer.read()] if request["has_data"] else []
    _limit(request["memory"], request["cpu"])
    module, _, name = request["function"].partition(":")
    try:
        found = {"result": getattr(importlib.import_module(module), name)(*request["arguments"], *data)}
    except TfexportError as error:
        found = {"error": type(error).__name__, "problems": error.problems}
        found |= {"subject": error.subject, "remedy": error.remedy}
    print("\n" + json.dumps(found), end="")  # noqa: T201 - read by the parent process


def _limit(memory_bytes: int | None, cpu_s: int | None) -> None:
    if sys.platform != "win32":
        limits = [] if cpu_s is None else [(resource.RLIMIT_CPU, cpu_s, cpu_s + 1)]
        if memory_bytes is not None:
            limits.append((resource.RLIMIT_AS, memory_bytes, memory_bytes))
            limits += [(resource.RLIMIT_FSIZE, 0, 0), (resource.RLIMIT_CORE, 0, 0)]
            limits.append((resource.RLIMIT_NOFILE, _MAX_FILES, _MAX_FILES))
        for kind, soft, hard in limits:
            with suppress(ValueError, OSError):  # a lower limit is set, or the system does not support this one
                resource.setrlimit(kind, (soft, hard))


if __name__ == "__main__":
    _main()
