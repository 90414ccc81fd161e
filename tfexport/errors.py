"""All errors that tfexport raises.

TfexportError
├── ConfigError      a configuration has unknown, missing or contradictory values
├── CheckpointError  weights are missing, damaged or do not fit their configuration
├── GraphError       a model cannot be traced, or its graph violates the contract
├── EngineError      an engine cannot be built from a graph, or cannot be used here
├── BundleError      a bundle is incomplete, changed, foreign or cannot be written
├── BackendError     a backend is not installed, not usable or failed while running
├── InputError       text or token ids are not valid input for the model
├── ServingError     a valid request was not answered
│   ├── QueueFull          too many requests are waiting
│   ├── DeadlineExceeded   the time limit of a request was exceeded
│   ├── Cancelled          a request was cancelled
│   ├── Draining           the engine is shutting down
│   └── EngineFailed       the engine has failed
├── BenchError       a measurement cannot be made, read or compared, or is worse than before
└── ParityError      the output of a stage differs from the eager model's

A message is one line with three parts, which are attributes of the error: what was checked (`subject`), what is wrong
(`problems`, each with the actual and the expected value), and how to fix it (`remedy`).
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

# Problems in one message; a damaged file can have thousands.
MAX_PROBLEMS = 20
# Most characters of a value, and most entries of a collection whose `repr` cannot be cut short.
_SPELLED, _MOST_ENTRIES = 80, 1000
# Most characters of another library's message.
_SAID = 300
_TEXTS: set[Any] = {str.__repr__, bytes.__repr__, bytearray.__repr__}
_BRACKETS: dict[Any, tuple[str, str]] = {
    list.__repr__: ("[", "]"),
    tuple.__repr__: ("(", ")"),
    set.__repr__: ("{", "}"),
    dict.__repr__: ("{", "}"),
}


class TfexportError(Exception):
    """Base class of all errors; the command line prints one line and exits with 1.

    Attributes:
        subject: what was checked; empty if the message does not name it separately.
        problems: every problem, including those that the message omits; a whole message is one problem.
        remedy: how to fix it; empty if the problems contain their own.
        indices: positions, from 0, of all wrong inputs of the call, including those that the message omits.
    """

    def __init__(self, *problems: str, subject: str = "", remedy: str = "", indices: Iterable[int] = ()) -> None:
        """Format the message: the first 20 problems, with unprintable characters escaped."""
        self.subject, self.problems, self.remedy = subject, problems, remedy
        self.indices = tuple(dict.fromkeys(indices))
        prefix, suffix = f"{subject}: " if subject else "", f"; {remedy}" if remedy else ""
        super().__init__(printable(f"{prefix}{self.reason}{suffix}"))

    @property
    def reason(self) -> str:
        """The problems as one text, without subject and remedy."""
        hidden = len(self.problems) - MAX_PROBLEMS
        more = [f"and {hidden} more"] if hidden > 0 else []
        return printable("; ".join([*self.problems[:MAX_PROBLEMS], *more]))

    def of(self, subject: str) -> dict[str, Any]:
        """Return keyword arguments for an error about `subject`, which contains this one."""
        return {"subject": f"{subject}: {self.subject}" if self.subject else subject, "remedy": self.remedy}


class ConfigError(TfexportError):
    """A configuration has unknown, missing or contradictory values."""


class CheckpointError(TfexportError):
    """Weights are missing, damaged or do not fit their configuration."""


class GraphError(TfexportError):
    """A model cannot be traced, or its graph violates the contract."""


class EngineError(TfexportError):
    """An engine cannot be built from a graph, or cannot be used here."""


class BundleError(TfexportError):
    """A bundle is incomplete, changed, foreign or cannot be written."""


class BackendError(TfexportError):
    """A backend is not installed, not usable or failed while running."""


class InputError(TfexportError):
    """Text or token ids are not valid input for the model."""


class ServingError(TfexportError):
    """A valid request was not answered."""


class QueueFull(ServingError):
    """Too many requests are waiting; try again after `retry_after_s` whole seconds."""

    def __init__(self, *problems: str, retry_after_s: int = 1) -> None:
        super().__init__(*problems)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(ServingError):
    """The time limit of a request was exceeded before it was answered."""


class Cancelled(ServingError):
    """A request was cancelled by its caller, or because its reader was too slow."""


class Draining(ServingError):
    """The engine is shutting down and accepts no more requests."""


class EngineFailed(ServingError):
    """The engine has failed and answers no more requests."""


class BenchError(TfexportError):
    """A measurement cannot be made, read or compared, or is worse than before."""


class ParityError(TfexportError):
    """The output of a stage differs from the eager model's; exit code 2."""


def printable(text: str) -> str:
    """Escape unprintable characters, such as line breaks and right-to-left marks."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def nth(what: str, index: int, count: int) -> str:
    """Name one input of a call, such as "text 3", or "the text" if it is the only one."""
    return f"the {what}" if count == 1 else f"{what} {index + 1}"


def shortened(value: object) -> str:
    """Format a value in about 80 characters; reads only the beginning of a huge value."""
    try:
        text = _begun(value, _SPELLED)
    except Exception:  # noqa: BLE001 - raised by the caller's object, or by a number with too many digits
        text = f"{type(value).__name__} that cannot be spelled"
    return text if len(text) <= _SPELLED else text[:_SPELLED] + "…"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if it has no message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def raised_by(error: BaseException) -> str:
    """Describe another library's error: type, first line and origin in the code."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name} line {frames[-1].lineno})" if frames else ""
    reason = first_line(error) if str(error).strip() else "no reason given"
    return f"{type(error).__name__}: {reason[:_SAID]}{where}"


def _begun(value: Any, room: int) -> str:
    """Return `repr(value)`, or at least its first `room` characters if it is longer."""
    spell: Any = type(value).__repr__
    if spell in _TEXTS:
        return repr(value[: max(room, 0)])  # the quotes make it longer than `room`
    if spell not in _BRACKETS or not value:
        count = _count(value)
        return repr(value) if count <= _MOST_ENTRIES else f"{type(value).__name__} with {count} entries"
    opening, closing = _BRACKETS[spell]
    text = opening
    for entry in value:
        if len(text) > room:
            return text
        text += _begun(entry, room - len(text))
        if spell is dict.__repr__:
            text += f": {_begun(value[entry], room - len(text) - 2)}"
        text += ", "
    alone = "," if closing == ")" and len(value) == 1 else ""
    return text.removesuffix(", ") + alone + closing


def _count(value: Any) -> int:
    try:
        return len(value)
    except (TypeError, OverflowError):  # no length, or a length too large for `len`
        return 0


def raise_all(
    error: type[TfexportError],
    subject: str,
    problems: Sequence[str],
    *,
    remedy: str = "",
    indices: Iterable[int] = (),
) -> None:
    """Raise one error that lists every problem; do nothing if there are none.

    A problem states what is wrong, the value, what is expected and how to fix it; `remedy` is for problems without
    their own. `indices` may repeat an input that has several problems.
    """
    if problems:
        raise error(*problems, subject=subject, remedy=remedy, indices=indices)
