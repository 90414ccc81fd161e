"""Runs commands of tfexport under a fault, each in a fork of a process that has loaded everything before.

Reads a request a line, as JSON, and answers each with a line: see `tests.fuzz.faults.inject`.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

faults = ctypes.CDLL(None)  # the preloaded library


def run(call: str, arguments: list[str]) -> int:
    """Call "module:function" with arguments; return the exit code that Python would end with."""
    module, _, name = call.partition(":")
    try:
        getattr(importlib.import_module(module), name)(arguments)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:  # noqa: BLE001 - as Python does at its end
        traceback.print_exc()
        return 1
    return 0


def attempt(request: dict[str, Any]) -> int:
    """Run in this process, which is a fork, with its own streams and the fault armed."""
    work = Path(request["work"])
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(work / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    log = os.open(work / "calls", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    faults.faults_arm(os.fsencode(request["folder"]), request["at"], request["action"], log)
    code = run(request["call"], request["arguments"])
    faults.faults_disarm()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def main() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        request = json.loads(line)
        if request.get("warm"):
            os.dup2(2, 1)
            status = run(request["call"], request["arguments"])
        elif child := os.fork():
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        else:
            os._exit(attempt(request))
        print(json.dumps({"status": status}), file=answers, flush=True)


if __name__ == "__main__":
    main()
