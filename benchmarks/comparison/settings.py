"""What is compared: each setting is one table row for every system."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

MODELS = ("tiny", "paper-base", "paper-big")
TARGET_LENGTH = 64
# Ids below are special in every preset.
FIRST_TOKEN = 4
# Rough, and only for the estimate of the time that is left: of a call, relative to the smallest.
_COST = {"tiny": 0.2, "paper-base": 10.0, "paper-big": 33.0}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Sizes at which systems are compared.

    Attributes:
        model: name of the weights.
        is_quantised: compare int8 and int4 instead of fp32.
        source_length: tokens of each source.
        batch_size: sources of one call.
        num_beams: 1 is greedy.
        target_length: tokens decoded for each source, neither more nor less.
    """

    model: str
    is_quantised: bool
    source_length: int
    batch_size: int
    num_beams: int
    target_length: int = TARGET_LENGTH

    @property
    def tokens(self) -> int:
        """Tokens that one call returns."""
        return self.batch_size * self.target_length

    @property
    def cost(self) -> float:
        """What a call costs, relative to others and roughly."""
        kind = 0.6 if self.is_quantised else 1.0
        work = math.pow(self.batch_size, 0.6) * math.sqrt(self.num_beams) * (0.8 + self.source_length / 160)
        return 0.1 + kind * _COST.get(self.model, 1.0) * work / 10

    def sources(self, vocab: int) -> list[list[int]]:
        """Draw the token ids of the sources, the same on every call and machine."""
        draw = random.Random(0)
        return [[draw.randrange(FIRST_TOKEN, vocab) for _ in range(self.source_length)] for _ in range(self.batch_size)]

    def __str__(self) -> str:
        """Name the setting in one line."""
        kind = "int8 and int4" if self.is_quantised else "fp32"
        decoding = "greedy" if self.num_beams == 1 else f"beam {self.num_beams}"
        return f"{self.model} {kind}, source {self.source_length}, batch {self.batch_size}, {decoding}"

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return asdict(self)


def matrix(
    models: Sequence[str],
    kinds: Sequence[bool],
    source_lengths: Sequence[int],
    batch_sizes: Sequence[int],
    num_beams: Sequence[int],
) -> list[Setting]:
    """Return every combination; those of one model and kind stand together, since they share loaded systems."""
    return [
        Setting(model=model, is_quantised=kind, source_length=source, batch_size=batch, num_beams=beams)
        for model, kind, source, batch, beams in product(models, kinds, source_lengths, batch_sizes, num_beams)
    ]
