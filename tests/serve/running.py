"""Run `tfexport serve` in a process of its own."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

COMMAND = "import sys; from tfexport.cli import main; main()"
# Generous: CI is busy.
PATIENCE_S = 60.0
_STEPS = """
import pathlib, threading, time
from tfexport.decode.loop import Loop
step = Loop.step
def heavy(loop, most=None):
    if threading.current_thread().name != "tfexport-engine":
        return step(loop, most)
    if pathlib.Path({file!r}).exists():
        {fault}
    time.sleep({seconds})
    return step(loop, 1)
Loop.step = heavy
"""


def slow_steps(seconds: float, *, file: Path = Path("/nowhere"), fault: str = "pass") -> str:
    """Return Python that lets each step of an engine take some time, and do something while there is a file."""
    return _STEPS.format(seconds=seconds, file=str(file), fault=fault)


@dataclass
class Running:
    """A server that listens; `log` has its standard error, `lines` the first lines of its standard output."""

    process: subprocess.Popen[str]
    url: str
    log: Path
    client: httpx.Client
    lines: list[str]

    def ask(self, text: str, name: str = "dates", **parameters: Any) -> httpx.Response:
        return self.client.post(
            f"/v2/models/{name}/generate", json={"text_input": text, "parameters": parameters}, timeout=PATIENCE_S
        )

    def is_ready(self) -> bool:
        return self.client.get("/readyz").status_code == 200

    def metric(self, line: str) -> float:
        """Return the sum of the samples whose name and labels match."""
        found = re.findall(rf"^{line} (\S+)$", self.client.get("/metrics").text, re.MULTILINE)
        return sum(map(float, found))

    def rss_mb(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="utf-8")
        return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) / 1024  # type: ignore[index]

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def ended(self) -> int:
        return self.process.wait(PATIENCE_S)

    def stop(self) -> int:
        self.send(signal.SIGTERM)
        return self.ended()


@contextmanager
def running(
    work: Path, *arguments: object, before: str = "", ready: bool = True, **of_client: Any
) -> Iterator[Running]:
    """Run `tfexport serve` on a free port, until the end at the latest; its log goes to the folder `work`.

    `before` is Python to run in its process before the command, such as a fault; `of_client` options of `httpx.Client`.
    """
    log = work / f"log-{time.monotonic_ns()}"
    command = [sys.executable, "-c", f"{before}\n{COMMAND}", "serve", *map(str, arguments), "--port", "0"]
    with log.open("w") as stderr:
        group = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)  # so that Windows sends Ctrl-Break only to it
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=stderr, encoding="utf-8", creationflags=group
        )
    assert process.stdout
    try:
        lines: list[str] = []
        late = threading.Timer(PATIENCE_S, process.kill)
        late.start()
        for line in process.stdout:
            lines.append(line.rstrip("\n"))
            if not ready or "in a browser" in line:
                break
        late.cancel()
        found = re.match(r"listening on (\S+),", lines[0]) if lines else None
        assert found, f"the server has not begun:\n{log.read_text()}"
        with httpx.Client(base_url=found[1], timeout=PATIENCE_S, **of_client) as client:
            yield Running(process, found[1], log, client, lines)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def eventually(holds: Callable[[], object], within_s: float = PATIENCE_S) -> None:
    end = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < end, "it never came to hold"
        time.sleep(0.02)
