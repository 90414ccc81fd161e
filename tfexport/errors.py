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
├── BenchError       a measurement cannot be made, read or compared
└── ParityError      the output of a stage differs from the eager model's

A message is one line with three parts, which are attributes of the error: what was checked (`subject`), what is wrong
(`problems`, each with the actual and the expected value), and how to fix it (`remedy`).
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

MAX_PROBLEMS = 20  # in one message; a damaged file can have thousands
_MAX_VALUE_CHARACTERS = 80
_MAX_ENTRIES = 1000  # of a collection whose `repr` cannot be cut short
_MAX_FOREIGN_CHARACTERS = 300  # of another library's message
_TEXTS: set[Any] = {str.__repr__, bytes.__repr__, bytearray.__repr__}
_BRACKETS: dict[Any, str] = {list.__repr__: "[]", tuple.__repr__: "()", set.__repr__: "{}", dict.__repr__: "{}"}


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
    """A measurement cannot be made, read or compared."""


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
        text = _repr_start(value, _MAX_VALUE_CHARACTERS)
    except Exception:  # noqa: BLE001 - raised by the caller's object, or by a number with too many digits
        text = f"{type(value).__name__} that cannot be printed"
    return text if len(text) <= _MAX_VALUE_CHARACTERS else text[:_MAX_VALUE_CHARACTERS] + "…"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if it has no message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def raised_by(error: BaseException) -> str:
    """Describe another library's error: type, first line and origin in the code."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name} line {frames[-1].lineno})" if frames else ""
    reason = first_line(error) if str(error).strip() else "no reason given"
    return f"{type(error).__name__}: {reason[:_MAX_FOREIGN_CHARACTERS]}{where}"


def _repr_start(value: Any, limit: int) -> str:
    """Return `repr(value)`, or at least its first `limit` characters if it is longer."""
    method: Any = type(value).__repr__
    if method in _TEXTS:
        return repr(value[: max(limit, 0)])  # the quotes make it longer than `limit`
    if method not in _BRACKETS or not value:
        count = 0
        with suppress(TypeError, OverflowError):  # no length, or a length too large for `len`
            count = len(value)
        return repr(value) if count <= _MAX_ENTRIES else f"{type(value).__name__} with {count} entries"
    text, closing = _BRACKETS[method][0], _BRACKETS[method][1]
    for entry in value:
        if len(text) > limit:
            return text
        text += _repr_start(entry, limit - len(text))
        if method is dict.__repr__:
            text += f": {_repr_start(value[entry], limit - len(text) - 2)}"
        text += ", "
    comma = "," if closing == ")" and len(value) == 1 else ""
    return text.removesuffix(", ") + comma + closing


def raise_all(
    error: type[TfexportError],
    subject: str,
    problems: Sequence[str],
    *,
    remedy: str = "",
    indices: Iterable[int] = (),
) -> None:
    """Raise one error that lists every problem; do nothing if there are none."""
    if problems:
        raise error(*problems, subject=subject, remedy=remedy, indices=indices)
