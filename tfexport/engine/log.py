"""What TensorRT says while it works: kept in bounds, and turned into the reason of an error."""

from __future__ import annotations

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
    """The logger that every builder, parser and runtime gets; it outlives them.

    `Flavour.logger` makes it a subclass of the library's own `ILogger` as well.
    The newest 2000 records from INFO up are kept, and the first 50 errors.
    """

    def __init__(self) -> None:
        """Begin empty."""
        super().__init__()
        self._records: deque[Record] = deque(maxlen=MAX_RECORDS)
        self._errors: list[str] = []

    def log(self, severity: Any, message: str) -> None:
        """Take a message; the library calls this, from any of its threads.

        Args:
            severity: the library's own enum.
            message: of any length.
        """
        if severity.name not in _KEPT:
            return
        self._records.append(Record(severity.name, message[:MAX_MESSAGE]))
        if severity.name.endswith("ERROR") and len(self._errors) < MAX_ERRORS:
            self._errors.append(message[:MAX_MESSAGE])

    @property
    def records(self) -> list[Record]:
        """What was said, oldest first."""
        return list(self._records)

    def lines(self) -> list[str]:
        """Return the records as lines of text, "WARNING message"; a message may hold several."""
        return [f"{record.severity} {line}" for record in self._records for line in record.message.splitlines()]

    def problems(self) -> list[str]:
        """Return the errors, each once, in one line and without the noise that follows every error on a CPU."""
        messages = dict.fromkeys(_one_line(message, noise=False) for message in self._errors)
        found = [message for message in messages if message]
        return found or list(dict.fromkeys(_one_line(message, noise=True) for message in self._errors))

    def reason(self) -> str:
        """Return the problems as one text, or say that there are none."""
        return "; ".join(self.problems()) or _SAID

    def clear(self) -> None:
        """Forget what was said, so that the next error has reasons of its own."""
        self._records.clear()
        self._errors.clear()


def without_noise(message: str) -> str:
    """Return a message in one line, without what follows every error where there is no driver."""
    return _one_line(message, noise=False)


def _one_line(message: str, *, noise: bool) -> str:
    return " ".join(line.strip() for line in message.splitlines() if noise or _NOISE not in line)
