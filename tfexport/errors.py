"""Every error that tfexport raises on purpose.

TfexportError
├── ConfigError      a configuration has unknown, missing or contradictory values
├── CheckpointError  weights are missing, damaged or do not fit their configuration
├── GraphError       a model could not be traced, or its graph breaks the contract
├── EngineError      a graph could not be built into an engine, or an engine may not be used here
├── BundleError      a bundle is incomplete, altered, foreign or cannot be written
├── BackendError     a backend is not installed, not usable or failed while running
├── InputError       text or token ids that the model cannot take
├── ServingError     a request was not answered, though nothing was wrong with it
│   ├── QueueFull          too many requests wait
│   ├── DeadlineExceeded   the time of a request was over
│   ├── Cancelled          a request was cancelled
│   ├── Draining           the engine is about to stop
│   └── EngineFailed       the engine has failed
├── BenchError       a measurement could not be made, read or compared, or it has become worse
└── ParityError      a stage says something else than the eager model

A message is one line made of three parts, which are attributes of the error: what was checked (`subject`), what is
wrong with it (`problems`, each with what was got and what was expected), and what to do (`remedy`).
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

# Problems that one message names; a damaged file can have thousands.
MAX_PROBLEMS = 20
# Characters that a value is spelled in, and entries of a collection that spells itself, which cannot be begun.
_SPELLED, _MOST_ENTRIES = 80, 1000
# Characters of what other code says.
_SAID = 300
_TEXTS: set[Any] = {str.__repr__, bytes.__repr__, bytearray.__repr__}
_BRACKETS: dict[Any, tuple[str, str]] = {
    list.__repr__: ("[", "]"),
    tuple.__repr__: ("(", ")"),
    set.__repr__: ("{", "}"),
    dict.__repr__: ("{", "}"),
}


class TfexportError(Exception):
    """Root of the tree; the command line prints it as one line and exits with 1.

    Attributes:
        subject: what was checked, the first words of the message; empty if the message does not name it apart.
        problems: all of them, also those that the message has no room for; a message given whole is one problem.
        remedy: the last words of the message; empty if the problems bring their own.
        indices: positions, from 0, of all inputs of the call that were wrong, also of those that the message has no
            room for; empty if the error is not about an input.
    """

    def __init__(self, *problems: str, subject: str = "", remedy: str = "", indices: Iterable[int] = ()) -> None:
        """Format the message: the first 20 problems, with unprintable characters escaped."""
        self.subject, self.problems, self.remedy = subject, problems, remedy
        self.indices = tuple(dict.fromkeys(indices))
        prefix, suffix = f"{subject}: " if subject else "", f"; {remedy}" if remedy else ""
        super().__init__(printable(f"{prefix}{self.reason}{suffix}"))

    @property
    def reason(self) -> str:
        """The problems as one text: the message without its subject and its remedy."""
        hidden = len(self.problems) - MAX_PROBLEMS
        more = [f"and {hidden} more"] if hidden > 0 else []
        return printable("; ".join([*self.problems[:MAX_PROBLEMS], *more]))

    def of(self, subject: str) -> dict[str, Any]:
        """Return the keyword arguments of an error with the same remedy, about a subject that contains this one's."""
        return {"subject": f"{subject}: {self.subject}" if self.subject else subject, "remedy": self.remedy}


class ConfigError(TfexportError):
    """A configuration has unknown, missing or contradictory values."""


class CheckpointError(TfexportError):
    """Weights are missing, damaged or do not fit their configuration."""


class GraphError(TfexportError):
    """A model could not be traced, or its graph breaks the contract."""


class EngineError(TfexportError):
    """A graph could not be built into an engine, or an engine may not be used here."""


class BundleError(TfexportError):
    """A bundle is incomplete, altered, foreign or cannot be written."""


class BackendError(TfexportError):
    """A backend is not installed, not usable or failed while running."""


class InputError(TfexportError):
    """Text or token ids that the model cannot take."""


class ServingError(TfexportError):
    """A request was not answered, though nothing was wrong with it."""


class QueueFull(ServingError):
    """Too many requests wait.

    Attributes:
        retry_after_s: whole seconds after which there may be room.
    """

    def __init__(self, *problems: str, retry_after_s: int = 1) -> None:
        """Keep both."""
        super().__init__(*problems)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(ServingError):
    """The time of a request was over before it was answered."""


class Cancelled(ServingError):
    """A request was cancelled by its caller, or because its reader was too slow."""


class Draining(ServingError):
    """The engine is about to stop and takes no more requests."""


class EngineFailed(ServingError):
    """The engine has failed and answers nothing any more."""


class BenchError(TfexportError):
    """A measurement could not be made, read or compared, or it has become worse."""


class ParityError(TfexportError):
    """A stage says something else than the eager model; exit code 2."""


def printable(text: str) -> str:
    """Spell out every character that is no plain one: line breaks, control characters, text that runs backwards."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def nth(what: str, index: int, count: int) -> str:
    """Name one of the inputs of a call, such as "text 3"; "the text" where it is the only one."""
    return f"the {what}" if count == 1 else f"{what} {index + 1}"


def shortened(value: object) -> str:
    """Spell a value of any origin in 80 characters or a few more; of what is huge only the beginning is looked at."""
    try:
        text = _begun(value, _SPELLED)
    except Exception:  # noqa: BLE001 - of an object of the caller, or of a number with too many digits
        text = f"{type(value).__name__} that cannot be spelled"
    return text if len(text) <= _SPELLED else text[:_SPELLED] + "…"


def first_line(error: BaseException) -> str:
    """Spell what an error of other code says, without its trace; its type where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def raised_by(error: BaseException) -> str:
    """Spell an error of other code: its type, the beginning of its first line, and the line of code that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name} line {frames[-1].lineno})" if frames else ""
    said = (str(error).strip().splitlines() or ["no reason given"])[0]
    return f"{type(error).__name__}: {said[:_SAID]}{where}"


def _begun(value: Any, room: int) -> str:
    """Spell a value as `repr` does, or where that is longer than `room` at least so much of its beginning."""
    spell: Any = type(value).__repr__
    if spell in _TEXTS:
        return repr(value[: max(room, 0)])  # with its quotes longer than that
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
    except (TypeError, OverflowError):  # it has no length, such as a number, or one beyond all numbers
        return 0


def raise_all(
    error: type[TfexportError],
    subject: str,
    problems: Sequence[str],
    *,
    remedy: str = "",
    indices: Iterable[int] = (),
) -> None:
    """Raise one error that lists every problem; do nothing if there is none.

    Args:
        error: class to raise.
        subject: what was checked, the first words of the message.
        problems: each "what, got, expected, remedy", without a final stop.
        remedy: of all problems, if they do not bring their own.
        indices: positions of all wrong inputs, from 0; repeated for an input with several problems.

    Raises:
        TfexportError: of class `error`, when `problems` is not empty.
    """
    if problems:
        raise error(*problems, subject=subject, remedy=remedy, indices=indices)
