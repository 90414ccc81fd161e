"""Every error that tfexport raises on purpose.

TfexportError
├── ConfigError      a configuration has unknown, missing or contradictory values
├── CheckpointError  weights are missing, damaged or do not fit their configuration
├── GraphError       a model could not be traced, or its graph breaks the contract
├── BundleError      a bundle is incomplete, altered, foreign or cannot be written
├── BackendError     a backend is not installed, not usable or failed while running
├── InputError       text or token ids that the model cannot take
└── ParityError      a stage says something else than the eager model

A message is one line: subject, what was got, what was expected, the remedy.
"""

from __future__ import annotations

from collections.abc import Sequence


class TfexportError(Exception):
    """Root of the tree; the command line prints it as one line and exits with 1."""


class ConfigError(TfexportError):
    """A configuration has unknown, missing or contradictory values."""


class CheckpointError(TfexportError):
    """Weights are missing, damaged or do not fit their configuration."""


class GraphError(TfexportError):
    """A model could not be traced, or its graph breaks the contract."""


class BundleError(TfexportError):
    """A bundle is incomplete, altered, foreign or cannot be written."""


class BackendError(TfexportError):
    """A backend is not installed, not usable or failed while running."""


class InputError(TfexportError):
    """Text or token ids that the model cannot take."""


class ParityError(TfexportError):
    """A stage says something else than the eager model; exit code 2."""


def raise_all(error: type[TfexportError], subject: str, problems: Sequence[str]) -> None:
    """Raise one error that lists every problem; do nothing when there is none.

    Args:
        error: class to raise.
        subject: what was checked, the first words of the message.
        problems: each "what, got, expected, remedy", without a final stop.

    Raises:
        TfexportError: of class `error`, when `problems` is not empty.
    """
    if problems:
        raise error(f"{subject}: " + "; ".join(problems))
