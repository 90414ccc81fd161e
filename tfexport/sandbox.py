"""Inspect untrusted input in a resource-limited subprocess."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from tfexport._io.names import checked_path
from tfexport._io.process import LIMITS_MEMORY, ProcessError, call_in_process
from tfexport.describe import inspect_path
from tfexport.errors import BackendError, InputError

_MAX_MEMORY_BYTES = 2 * 1024**3  # manifests have at most 4 MiB, and graphs with external weights are small too
_MAX_CPU_S, _MAX_WALL_S = 300, 900  # hashing weights takes about one second per gigabyte


def inspect_untrusted(
    path: str | os.PathLike[str], *, trusted_keys: Sequence[str | os.PathLike[str]] = ()
) -> dict[str, Any]:
    """Describe an untrusted path like `inspect_path`, in a subprocess with limits.

    The subprocess has at most 2 GiB of memory and 300 s of CPU time and cannot write files. No graph is run. Without
    `trusted_keys` every bundle is accepted. Raises `InputError` if the subprocess exceeds a limit or fails, and
    `BackendError` on Windows and macOS, which do not limit memory.
    """
    if not LIMITS_MEMORY:
        problem = f"{sys.platform} does not limit the memory of a process"
        raise BackendError(f"inspect: {problem}, expected Linux; inspect untrusted input there, such as in a container")
    paths = [os.fspath(checked_path(each, "inspect")) for each in (path, *trusted_keys)]
    try:
        found: dict[str, Any] = call_in_process(
            "tfexport.sandbox:_inspect", *paths, memory_bytes=_MAX_MEMORY_BYTES, cpu_s=_MAX_CPU_S, wall_s=_MAX_WALL_S
        )
    except ProcessError as error:
        raise InputError(f"{path}: reading it {error}; do not load it") from error
    return found


def _inspect(path: str, *keys: str) -> dict[str, Any]:
    return inspect_path(path, trusted_keys=keys or None, for_here=False)
