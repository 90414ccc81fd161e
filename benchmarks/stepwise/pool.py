"""The processes of a model and precision, one a contender; a request that takes too long ends its process."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from comparison.processes import Worker

from tfexport.errors import BenchError

_MODULE = "stepwise.worker"


class Pool:
    """Processes by contender; one that failed is not tried again.

    Attributes:
        failures: why a contender takes no part, by name.
        opened: what each said of itself when it opened the model.
    """

    def __init__(self, opening: Mapping[str, Any], limit_s: float) -> None:
        """Begin empty.

        Args:
            opening: the request that opens the model, without the contender.
            limit_s: seconds that a request may take.
        """
        self.failures: dict[str, str] = {}
        self.opened: dict[str, dict[str, Any]] = {}
        self._opening, self._limit_s = opening, limit_s
        self._workers: dict[str, Worker] = {}

    def ask(self, contender: str, op: str, **values: Any) -> dict[str, Any] | None:
        """Ask a contender, whose process is started the first time; None where it takes no part (any more)."""
        if contender in self.failures:
            return None
        try:
            if contender not in self._workers:
                self._workers[contender] = Worker(contender, Path(sys.executable), _MODULE)
                self.opened[contender] = self._within_limit(
                    contender, "open", {"contender": contender, **self._opening}
                )
            return self._within_limit(contender, op, values)
        except BenchError as error:
            self.failures[contender] = str(error).removeprefix(f"{contender}: ")
            if worker := self._workers.pop(contender, None):
                worker.close()
            return None

    def close(self) -> None:
        """End all processes."""
        while self._workers:
            self._workers.popitem()[1].close()

    def _within_limit(self, contender: str, op: str, values: Mapping[str, Any]) -> dict[str, Any]:
        worker, is_late = self._workers[contender], threading.Event()

        def end() -> None:
            is_late.set()
            worker.kill()

        timer = threading.Timer(self._limit_s, end)
        timer.start()
        try:
            return worker.ask(op, **values)
        except BenchError as error:
            if is_late.is_set():
                raise BenchError(f"{op} took longer than {self._limit_s:g} s") from error
            raise
        finally:
            timer.cancel()
