"""Loaded systems of one model and kind: each in a process of its own, kept from setting to setting."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from comparison.contestants import SYSTEMS, Contestant
from comparison.process import Worker, start
from comparison.settings import Setting
from comparison.workshop import Workshop
from tfexport.errors import BenchError

# Fresh processes whose load time and memory are measured; the last one goes on to decode.
STARTS = 3


class Pool:
    """Processes by contestant; a system that failed once is not tried again.

    Attributes:
        loads: what loading each contestant took: `import_s`, `load_s`, `first_call_s` and `peak_bytes`, one of each
            for every fresh process, and `versions`.
    """

    def __init__(self, workshop: Workshop, model: str) -> None:
        """Begin empty."""
        self.loads: dict[Contestant, dict[str, Any]] = {}
        self._workshop, self._model = workshop, model
        self._workers: dict[Contestant, Worker] = {}
        self._failures: dict[Contestant, BenchError] = {}

    def worker(self, contestant: Contestant, setting: Setting) -> Worker:
        """Return a contestant's process; the first time, start it and measure its start at a batch of 1.

        Raises:
            BenchError: it has no environment, its weights could not be made, or it failed or died.
        """
        if contestant in self._failures:
            raise self._failures[contestant]
        if contestant not in self._workers:
            try:
                self._start(contestant, replace(setting, batch_size=1, num_beams=1))
            except BenchError as error:
                self.fail(contestant, error)
                raise
        return self._workers[contestant]

    def fail(self, contestant: Contestant, error: BenchError) -> None:
        """End a contestant's process; it takes no further part."""
        self._failures[contestant] = error
        if worker := self._workers.pop(contestant, None):
            worker.close()

    def close(self) -> None:
        """End all processes."""
        while self._workers:
            self._workers.popitem()[1].close()

    def _start(self, contestant: Contestant, first: Setting) -> None:
        folder = self._workshop.prepared(self._model, contestant)
        sources = first.sources(self._workshop.vocab(self._model))
        load: dict[str, Any] = {"import_s": [], "load_s": [], "first_call_s": [], "peak_bytes": []}
        for _ in range(1 if SYSTEMS[contestant.system].is_slow else STARTS):
            if previous := self._workers.pop(contestant, None):
                previous.close()
            worker = start(str(contestant), contestant.system, self._workshop.python(contestant))
            self._workers[contestant] = worker
            loaded = worker.ask(
                "load", folder=str(folder.resolve()), precision=contestant.precision, threads=contestant.threads
            )
            called = worker.ask("call", sources=sources, num_beams=1, new_tokens=first.target_length)
            for name, value in (
                ("import_s", loaded["import_s"]),
                ("load_s", loaded["load_s"]),
                ("first_call_s", called["seconds"]),
                ("peak_bytes", worker.ask("peak")["bytes"]),
            ):
                load[name].append(value)
        self.loads[contestant] = {**load, "versions": loaded["versions"]}
