"""What is measured: a model, a precision and a batch, and what every contender decodes in such a cell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import numpy as np

from tfexport.runtime.session import Ids, Mask
from tfexport.spec import FLOAT, ModelSpec, Precision

Device = Literal["cuda", "cpu"]
DEVICES: tuple[Device, ...] = get_args(Device)
PRECISIONS: tuple[Precision, ...] = ("fp16", "fp32", "bf16")
# Tokens of a source, and of a target, whose first step is taken before the clock runs.
SOURCE_LENGTH, TARGET_LENGTH = 32, 32
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One setting.

    Attributes:
        model: name of a preset, whose weights are random.
        precision: of weights and activations.
        batch: sources at once, each a row.
    """

    model: str
    precision: Precision
    batch: int

    def to_dict(self) -> dict[str, Any]:
        """Return the setting as JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        """Name the setting."""
        return f"{self.model} {self.precision}, batch {self.batch}"


def matrix(models: Sequence[str], precisions: Sequence[Precision], batches: Sequence[int]) -> list[Cell]:
    """Return all cells; those of one model and precision stand together."""
    return [
        Cell(model=model, precision=precision, batch=batch)
        for model in models
        for precision in precisions
        for batch in batches
    ]


def num_steps(spec: ModelSpec) -> int:
    """Return how many steps a decode has, of which all but the first are timed."""
    return min(TARGET_LENGTH, spec.max_target_length)


def sources(spec: ModelSpec, batch: int) -> tuple[Ids, Mask]:
    """Draw sources of one length without special tokens: ids int64 [batch, source_len], and a mask of ones."""
    low = max(spec.tokens.pad, spec.tokens.eos, spec.tokens.start) + 1
    shape = batch, min(SOURCE_LENGTH, spec.max_source_length)
    return np.random.default_rng(0).integers(low, spec.source_vocab, shape), np.ones(shape, np.bool_)


def cache_bytes(spec: ModelSpec, batch: int) -> float:
    """Return the least that a step reads of its caches, in bytes, the mean over the steps that are timed.

    That is the keys and values of the source, and those of the tokens so far, the new one included.
    """
    token = spec.layers * spec.cache_heads * (spec.head_dim + spec.value_dim) * _BYTES[FLOAT[spec.precision]]
    steps = num_steps(spec)
    return token * batch * (min(SOURCE_LENGTH, spec.max_source_length) + (2 + steps) / 2)
