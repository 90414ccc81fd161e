"""Report where an engine differs from float32, and what mends it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

_SHOWN = 12


@dataclass(frozen=True)
class StageError:
    """The largest error of a stage's outputs, as a share of the largest value."""

    stage: str
    output: str
    error: float


@dataclass(frozen=True)
class LayerError:
    """The largest error of a layer's tensors, and the largest value in float32."""

    layer: str
    tensor: str
    error: float
    largest: float


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Result of a search for layers that lose precision."""

    name: str  # of the engine
    sources: str
    runner: str
    tolerance: float
    limit: float  # the largest finite value of the precision
    stages: list[StageError]
    layers: list[LayerError]  # of the first stage that differs, from its first tensor that differs
    fp32_layers: list[str] | None  # that mend it; None if no layers do
    mended: list[StageError]  # errors with these layers
    command: str | None  # builds engines with them

    @property
    def agrees(self) -> bool:
        """Whether every stage is within the tolerance."""
        return all(stage.error <= self.tolerance for stage in self.stages)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as JSON values."""
        return {**asdict(self), "agrees": self.agrees}

    def lines(self) -> list[str]:
        """Return the lines for the terminal."""
        return [
            f"{self.name}, run by {self.runner}, inputs from {self.sources}",
            "",
            *self._stage_lines(),
            *([] if self.agrees else self._layer_lines() + self._remedy_lines()),
        ]

    def _stage_lines(self) -> Iterator[str]:
        rows = [("stage", "largest error", "output")]
        for stage in self.stages:
            verdict = stage.output + ("" if stage.error <= self.tolerance else "  DIFFERS")
            rows.append((stage.stage, _percent(stage.error), verdict))
        yield from _table(rows)
        yield f"Errors are shares of the largest value, computed in float32. Tolerance: {_percent(self.tolerance)}"

    def _layer_lines(self) -> list[str]:
        if not self.layers:
            return ["", "No inner tensor differs if all are outputs: the engine differs only when it fuses them."]
        first = self.layers[0]
        beyond = f"; the largest number of its type is {self.limit:.5g}" if first.largest > self.limit else ""
        rows = [("layer", "largest error", "largest value")]
        rows += [(each.layer, _percent(each.error), f"{each.largest:.3g}") for each in self.layers[:_SHOWN]]
        more = [f"  and {rest} more layers"] if (rest := len(self.layers) - _SHOWN) > 0 else []
        stage = next(stage.stage for stage in self.stages if stage.error > self.tolerance)
        return [
            "",
            f"First in {stage}: tensor {first.tensor} of {first.layer}, which reaches {first.largest:.3g}{beyond}",
            *_table(rows),
            *more,
        ]

    def _remedy_lines(self) -> list[str]:
        if self.fp32_layers is None:
            return [
                "",
                "No layers in float32 mend it: the outputs themselves exceed the type; use --precision bf16 or fp32",
            ]
        worst = max(stage.error for stage in self.mended)
        return [
            "",
            f"With {len(self.fp32_layers)} layers in float32 the largest error is {_percent(worst)}:",
            f"  {self.command}",
        ]


def _percent(error: float) -> str:
    return "inf or NaN" if np.isinf(error) else f"{100 * error:.3g} %"


def _table(rows: Sequence[tuple[str, str, str]]) -> list[str]:
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    return [f"  {a:<{first}}  {b:<{second}}  {c}" for a, b, c in rows]
