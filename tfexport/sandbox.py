"""Inspect what a stranger has sent: in a process of its own that has little memory and time and can write nothing."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from tfexport import errors
from tfexport._io.paths import checked_path
from tfexport.errors import InputError, TfexportError

# A manifest has at most 4 MiB, and graphs whose weights lie beside them are as small: far below in all honest cases.
MAX_MEMORY_BYTES = 2 * 1024**3
# Sums of weights are computed at a gigabyte a second or so.
MAX_CPU_S = 300
_MAX_WALL_S = 900
_MAX_FILES = 64


def inspect_untrusted(
    path: str | os.PathLike[str], *, trusted_keys: Sequence[str | os.PathLike[str]] = ()
) -> dict[str, Any]:
    """Describe what lies at `path` as `tfexport.describe.inspect_path` does, from a process that is bounded.

    Nothing of it is run there, nor asked of the network.

    Args:
        path: a bundle, a model directory or an ONNX file.
        trusted_keys: files of public keys, one of which must have signed a bundle; none for whosever.

    Raises:
        InputError: the process was ended, because it asked for too much or otherwise.
        TfexportError: what `inspect_path` raises.
    """
    words = [os.fspath(checked_path(word, "inspect")) for word in (path, *trusted_keys)]
    try:
        done = subprocess.run(  # noqa: S603 - our own module, our own interpreter
            [sys.executable, "-P", "-m", "tfexport.sandbox", *words],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # each of its threads takes memory that is bounded here
            capture_output=True,
            timeout=_MAX_WALL_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise InputError(f"{path}: was not read within {_MAX_WALL_S} s; do not load it") from error
    if done.returncode:
        raise InputError(f"{path}: reading it {_end(done.returncode, done.stderr)}; do not load it")
    found: dict[str, Any] = json.loads(done.stdout)
    if "error" in found:
        kind: type[TfexportError] = getattr(errors, found["error"]["class"], TfexportError)
        raise kind(found["error"]["message"])
    return found


def main() -> None:
    """Inspect the path of the first argument, with the keys of the others, and print what was found as JSON."""
    limit()
    from tfexport.describe import inspect_path

    path, *keys = sys.argv[1:]
    try:
        found = inspect_path(path, trusted_keys=keys or None, for_here=False)
    except TfexportError as error:
        found = {"error": {"class": type(error).__name__, "message": str(error)}}
    except MemoryError:
        message = f"{path}: needs more than {MAX_MEMORY_BYTES} bytes of memory to be read; do not load it"
        found = {"error": {"class": "InputError", "message": message}}
    print(json.dumps(found))  # noqa: T201 - to the process that has started this one


def limit() -> None:
    """Take from this process what reading does not need; nothing gives it back."""
    for kind, most in (
        (resource.RLIMIT_AS, MAX_MEMORY_BYTES),
        (resource.RLIMIT_CPU, MAX_CPU_S),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, _MAX_FILES),
    ):
        _, hard = resource.getrlimit(kind)
        least = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (least, least))


def _end(code: int, stderr: bytes) -> str:
    if code == -signal.SIGXCPU:
        return f"takes more than {MAX_CPU_S} s of CPU time"
    if code < 0:
        return f"was ended by signal {-code}"
    return f"failed ({(stderr.decode(errors='replace').strip().splitlines() or ['no reason given'])[-1]})"


if __name__ == "__main__":
    main()
