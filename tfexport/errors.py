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

A message is one line: subject, what was got, what was expected, the remedy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

# Problems that one message names; a damaged file can have thousands.
MAX_PROBLEMS = 20


class TfexportError(Exception):
    """Root of the tree; the command line prints it as one line and exits with 1.

    Attributes:
        indices: places of the inputs that were wrong, from 0, in the lists that the call was given: all of them, also
            those that the message has no room for. Empty where the error is about no input.
    """

    def __init__(self, message: str, *, indices: Iterable[int] = ()) -> None:
        """Keep `message` with what a terminal would not show as it is spelled out, such as a line break in a name."""
        super().__init__(printable(message))
        self.indices = tuple(dict.fromkeys(indices))


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

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        """Keep both."""
        super().__init__(message)
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


def shortened(value: object) -> str:
    """Spell a value of any origin in 80 characters or a few more."""
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "…"


def raise_all(
    error: type[TfexportError], subject: str, problems: Sequence[str], *, indices: Iterable[int] = ()
) -> None:
    """Raise one error that lists every problem, the first 20 in words; do nothing when there is none.

    Args:
        error: class to raise.
        subject: what was checked, the first words of the message.
        problems: each "what, got, expected, remedy", without a final stop.
        indices: places of all wrong inputs, from 0; again and again where one has several problems.

    Raises:
        TfexportError: of class `error`, when `problems` is not empty.
    """
    hidden = len(problems) - MAX_PROBLEMS
    if problems:
        listed = [*problems[:MAX_PROBLEMS], *([f"and {hidden} more"] if hidden > 0 else [])]
        raise error(f"{subject}: " + "; ".join(listed), indices=indices)
