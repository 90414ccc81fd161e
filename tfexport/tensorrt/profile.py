"""Optimization profiles as data: which shapes an engine was built for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# Positions of the profiles in the engine of a decoder.
STEP, PREFILL = 0, 1

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ShapeRange:
    """The shapes of one input; for `num_candidates`, which is a shape itself, its values."""

    min: Shape
    opt: Shape
    max: Shape


Profile = Mapping[str, ShapeRange]  # by input name
