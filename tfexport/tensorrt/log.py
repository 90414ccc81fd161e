"""What TensorRT says while it works: kept in bounds, and turned into the reason of an error."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any, Literal

Severity = Literal["INTERNAL_ERROR", "ERROR", "WARNING", "INFO"]

# A build says a few dozen lines; what is damaged or runs in circles says more.
MAX_RECORDS = 2_000
MAX_ERRORS = 50
MAX_MESSAGE = 2_000

# What follows any other error where there is no driver. Alone it is the reason itself.
_NOISE = "cudaError 35"
_KEPT = ("INTERNAL_ERROR", "ERROR", "WARNING", "INFO")
_SAID = "TensorRT gives no reason"


@dataclass(frozen=True)
class Record:
    """One message of the library, at most 2000 characters of it."""

    severity: Severity
    message: str


class Log:
    """What was said since it was made: the newest 2000 records from INFO up, and the newest 50 errors.

    The library has one logger for the whole process (`Logger`) and does not say
    on whose behalf it speaks: every log that is alive takes every message.
    """

    def __init__(self) -> None:
        """Begin empty."""
        self._records: deque[Record] = deque(maxlen=MAX_RECORDS)
        self._errors: deque[str] = deque(maxlen=MAX_ERRORS)

    def take(self, record: Record) -> None:
        """Keep one message."""
        self._records.append(record)
        if record.severity.endswith("ERROR"):
            self._errors.append(record.message)

    @property
    def records(self) -> list[Record]:
        """What was said, oldest first."""
        return list(self._records)

    def lines(self) -> list[str]:
        """Return the records as lines of text, "WARNING message"; a message may hold several."""
        return [f"{record.severity} {line}" for record in self.records for line in record.message.splitlines()]

    def problems(self) -> list[str]:
        """Return the errors, each once, in one line and without the noise that follows every error on a CPU."""
        errors = list(self._errors)
        messages = dict.fromkeys(_one_line(message, noise=False) for message in errors)
        found = [message for message in messages if message]
        return found or list(dict.fromkeys(_one_line(message, noise=True) for message in errors))

    def reason(self) -> str:
        """Return the problems as one text, or say that there are none."""
        return "; ".join(self.problems()) or _SAID

    def clear(self) -> None:
        """Forget what was said, so that the next error has reasons of its own."""
        self._records.clear()
        self._errors.clear()


class Logger:
    """The logger that is handed to the library, once for the process: a second one would be ignored with a warning.

    `Library` makes it a subclass of the library's own `ILogger` as well.
    """

    def __init__(self) -> None:
        """Begin without listeners."""
        super().__init__()
        self._logs: weakref.WeakSet[Log] = weakref.WeakSet()
        self._lock = threading.Lock()

    def listen(self) -> Log:
        """Make a log that takes every message from now on, for as long as anyone keeps it."""
        log = Log()
        with self._lock:
            self._logs.add(log)
        return log

    def log(self, severity: Any, message: str) -> None:
        """Take a message; the library calls this, from any of its threads.

        Args:
            severity: the library's own enum.
            message: of any length.
        """
        if severity.name in _KEPT:
            record = Record(severity.name, message[:MAX_MESSAGE])
            with self._lock:
                logs = list(self._logs)
            for log in logs:
                log.take(record)


def without_noise(message: str) -> str:
    """Return a message in one line, without what follows every error where there is no driver."""
    return _one_line(message, noise=False)


def _one_line(message: str, *, noise: bool) -> str:
    return " ".join(line.strip() for line in message.splitlines() if noise or _NOISE not in line)
