"""Represent the result of a verification: values, JSON, and a table."""

from __future__ import annotations

import dataclasses
import math
import textwrap
from dataclasses import dataclass
from typing import Any

from tfexport import _html
from tfexport.bundle.status import Proof, proof_of

_COLUMNS = ("stage", "check", "result", "")


@dataclass(frozen=True)
class Numbers:
    """A check that compares numbers of a stage with the eager model's."""

    stage: str
    error: float  # largest |difference| as a share of the largest |value|; NaN if the stage returned NaN
    worst: float  # largest |difference|
    tolerance: float  # limit of `error`
    place: str  # of the largest difference
    quantity: str = "logits"  # or "speculation", "alignment" or "states"

    @property
    def passed(self) -> bool:
        return self.error <= self.tolerance

    def problem(self) -> str | None:
        if self.passed:
            return None
        subject = self.stage if self.quantity == "logits" else f"{self.quantity} of {self.stage}"
        if math.isnan(self.error):
            return f"{subject} gives NaN at {self.place}"
        return (
            f"{subject} differs by {self.error:.1e} of the largest value at {self.place}, "
            f"the limit is {self.tolerance:.0e}"
        )

    def row(self) -> tuple[str, ...]:
        result = f"{self.error:.1e} ≤ {self.tolerance:.0e}"
        return self.stage, self.quantity, result, "✓" if self.passed else "✗"


@dataclass(frozen=True)
class Divergence:
    """Differences from the reference's decodes; medians over those that differ."""

    equal: float  # share of the sequences that are equal token for token
    position: float | None  # of the first different token, from 0
    margin: float | None  # difference of the reference's two best logits at that token


@dataclass(frozen=True)
class Decodes:
    """A check that compares whole decodes of a stage with the eager model's.

    `method` is "greedy", "beam 4", "batch invariance" (single sources and padded batches of the same stage), "full
    length" (greedy, up to the length limits), or with the user's own code, "recorded texts" or "own loop".
    A decode that is not equal is a tie if the eager model also produces it with its logits perturbed by twice the
    stage's measured error: rounding decides.
    """

    stage: str
    method: str
    sequences: int  # number of decodes
    exact: int  # decodes that are equal token for token
    ties: int
    first: str | None  # describes the first difference, preferably one that is not a tie
    must_be_exact: bool  # whether other differences fail; otherwise they are only reported
    divergence: Divergence | None = None  # None if sequences must be exact, and for batch invariance

    @property
    def passed(self) -> bool:
        return not self.must_be_exact or self._different == 0

    def problem(self) -> str | None:
        if self.passed:
            return None
        count = f"{self._different} of {self.sequences}"
        return f"{self.stage}, {self.method}: {count} sequences differ; first: {self.first}"

    def row(self) -> tuple[str, ...]:
        result = f"{self.exact}/{self.sequences} exact"
        if self.ties:
            result += f", {self.ties} {'tie' if self.ties == 1 else 'ties'}"
        if self.divergence is not None and self.divergence.position is not None:
            position, margin = self.divergence.position, self.divergence.margin
            result += f", first difference at token {position:g}, margin {margin:.1e}"
        return self.stage, self.method, result, "✗" if not self.passed else "·" if self._different else "✓"

    @property
    def _different(self) -> int:
        return self.sequences - self.exact - self.ties


@dataclass(frozen=True, repr=False)
class Report:
    """All parity checks of a verification."""

    reference: str
    samples: int
    seed: int
    numbers: tuple[Numbers, ...]
    decodes: tuple[Decodes, ...]
    author: str | None = None  # outputs of the author's code that the reference agrees with
    source_tokens: int = 0  # length of the longest source that was compared
    target_tokens: int = 0
    is_capped: bool = False  # whether the model accepts longer ones

    @property
    def proof(self) -> Proof:
        """What the outputs were compared with."""
        return proof_of(self.passed, self.author)

    @property
    def checks(self) -> tuple[Numbers | Decodes, ...]:
        """All checks, in order."""
        return (*self.numbers, *self.decodes)

    @property
    def passed(self) -> bool:
        """Whether every check passed."""
        return all(check.passed for check in self.checks)

    def problems(self) -> list[str]:
        """Describe each failed check."""
        return [problem for check in self.checks if (problem := check.problem())]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values; NaN and infinity become null."""
        report = dataclasses.asdict(self)
        del report["author"]  # the proof names it
        for check, values in zip(self.checks, (*report["numbers"], *report["decodes"]), strict=True):
            values["passed"] = check.passed
        for values in report["numbers"]:
            values |= {key: values[key] if math.isfinite(values[key]) else None for key in ("error", "worst")}
        return {**report, "passed": self.passed, **self.proof.to_dict()}

    def summary(self) -> dict[str, Any]:
        """Return the summary that the manifest contains."""
        return {
            "passed": self.passed,
            "reference": self.reference,
            "samples": self.samples,
            "seed": self.seed,
            "source_tokens": self.source_tokens,
            "target_tokens": self.target_tokens,
            "worst_error": max(check.error for check in self.numbers),
            **{name: sum(getattr(check, name) for check in self.decodes) for name in ("sequences", "exact", "ties")},
        }

    def lines(self) -> list[str]:
        """Format the report for a terminal."""
        rows = [_COLUMNS, *(check.row() for check in self.checks)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        for problem in self.problems():
            table += textwrap.wrap(f"✗ {problem}", 100, subsequent_indent="  ")
        return [*table, self._verdict, *([str(self.proof)] if self.passed else [])]

    def __repr__(self) -> str:
        return "\n".join(self.lines())

    def _repr_html_(self) -> str:
        return _html.table(
            _COLUMNS, [check.row() for check in self.checks], "\n".join([self._verdict, *self.problems()])
        )

    @property
    def _verdict(self) -> str:
        lengths = f", compared up to {self.source_tokens} source and {self.target_tokens} target tokens"
        return f"parity with {self.reference}: {'passed' if self.passed else 'FAILED'}{lengths * self.is_capped}"
