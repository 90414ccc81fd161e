"""The result of a verification: values, JSON, and lines for the terminal."""

from __future__ import annotations

import dataclasses
import math
import textwrap
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Numbers:
    """One check that compares numbers of a stage with the eager model's.

    Attributes:
        error: largest |difference| as a share of the largest |value|; NaN if the stage returned NaN.
        worst: largest |difference|.
        tolerance: limit of `error`.
        place: of the largest difference.
        quantity: "logits", "speculation" or "alignment".
    """

    stage: str
    error: float
    worst: float
    tolerance: float
    place: str
    quantity: str = "logits"

    @property
    def passed(self) -> bool:
        """Whether the error is within the tolerance; NaN never is."""
        return self.error <= self.tolerance

    def problem(self) -> str | None:
        """Describe the failure, or return None if the check passed."""
        if self.passed:
            return None
        who = self.stage if self.quantity == "logits" else f"{self.quantity} of {self.stage}"
        if self.error != self.error:
            return f"{who} gives NaN at {self.place}"
        return (
            f"{who} differs by {self.error:.1e} of the largest value at {self.place}, the limit is {self.tolerance:.0e}"
        )


@dataclass(frozen=True)
class Divergence:
    """Differences from the reference's decodes, for stages that need not be exact.

    Attributes:
        equal: share of the sequences that are equal token for token.
        position: of the first different token, from 0; median over the other sequences, None if all are equal.
        margin: difference of the reference's two best logits at that token; median, None if all are equal.
    """

    equal: float
    position: float | None
    margin: float | None


@dataclass(frozen=True)
class Decodes:
    """One check that compares whole decodes of a stage with the eager model's.

    Attributes:
        method: "greedy", "beam 4", "batch invariance" (single sources and padded batches of the same stage), or
            "recorded texts" (text to text, compared with the user's own code).
        sequences: number of decodes.
        exact: number of decodes that are equal token for token.
        ties: number of other decodes that the eager model also produces if its logits are perturbed by twice the
            stage's measured error: rounding decides.
        first: describes the first difference, preferably one that is not a tie.
        must_be_exact: whether other differences fail; otherwise they are only reported.
        divergence: None if sequences must be exact, and for batch invariance.
    """

    stage: str
    method: str
    sequences: int
    exact: int
    ties: int
    first: str | None
    must_be_exact: bool
    divergence: Divergence | None = None

    @property
    def passed(self) -> bool:
        """Whether every sequence is equal or a tie, or differences are only reported."""
        return not self.must_be_exact or self.exact + self.ties == self.sequences

    def problem(self) -> str | None:
        """Describe the failure, or return None if the check passed."""
        if self.passed:
            return None
        different = self.sequences - self.exact - self.ties
        return f"{self.stage}, {self.method}: {different} of {self.sequences} sequences differ; first: {self.first}"


@dataclass(frozen=True)
class Report:
    """All checks of a verification."""

    reference: str
    samples: int
    seed: int
    numbers: tuple[Numbers, ...]
    decodes: tuple[Decodes, ...]

    @property
    def rungs(self) -> tuple[Numbers | Decodes, ...]:
        """All checks, in order."""
        return (*self.numbers, *self.decodes)

    @property
    def passed(self) -> bool:
        """Whether every check passed."""
        return all(rung.passed for rung in self.rungs)

    def problems(self) -> list[str]:
        """Describe each failed check."""
        return [problem for rung in self.rungs if (problem := rung.problem())]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values; NaN and infinity become null."""
        report = dataclasses.asdict(self)
        for rung, values in zip(self.rungs, (*report["numbers"], *report["decodes"]), strict=True):
            values["passed"] = rung.passed
        for values in report["numbers"]:
            for key in ("error", "worst"):
                values[key] = values[key] if math.isfinite(values[key]) else None
        return {**report, "passed": self.passed}

    def summary(self) -> dict[str, Any]:
        """Return the summary that the manifest contains."""
        return {
            "passed": self.passed,
            "reference": self.reference,
            "samples": self.samples,
            "seed": self.seed,
            "worst_error": max(rung.error for rung in self.numbers),
            "sequences": sum(rung.sequences for rung in self.decodes),
            "exact": sum(rung.exact for rung in self.decodes),
            "ties": sum(rung.ties for rung in self.decodes),
        }

    def lines(self) -> list[str]:
        """Format the report for a terminal."""
        rows = [("stage", "check", "result", "")]
        for number in self.numbers:
            mark = "✓" if number.passed else "✗"
            rows.append((number.stage, number.quantity, f"{number.error:.1e} ≤ {number.tolerance:.0e}", mark))
        for decode in self.decodes:
            result = f"{decode.exact}/{decode.sequences} exact" + (
                "" if not decode.ties else ", 1 tie" if decode.ties == 1 else f", {decode.ties} ties"
            )
            parted = decode.divergence
            if parted is not None and parted.position is not None:
                result += f", parting at token {parted.position:g}, margin {parted.margin:.1e}"
            mark = "✓" if decode.exact + decode.ties == decode.sequences else "·" if decode.passed else "✗"
            rows.append((decode.stage, decode.method, result, mark))
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        verdict = f"parity with {self.reference}: " + ("passed" if self.passed else "FAILED")
        problems = [textwrap.wrap(f"✗ {problem}", 100, subsequent_indent="  ") for problem in self.problems()]
        return [*table, *(line for lines in problems for line in lines), verdict]
