"""The bounds of logits that are multiplied in 8 bits."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from tfexport.export.ranking import ranking_table

Floats = NDArray[np.float32]


def rounded(hidden: Floats) -> Floats:
    """Round as DynamicQuantizeLinear: 8 bits for the range of all rows and 0."""
    low, high = min(hidden.min(), np.float32(0)), max(hidden.max(), np.float32(0))
    scale = np.float32((high - low) / np.float32(255)) or np.float32(1)
    zero = np.rint(-low / scale).clip(0, 255)
    return ((np.rint(hidden / scale) + zero).clip(0, 255) - zero).astype(np.float32) * scale


def drawn(kind: str, rng: np.random.Generator) -> tuple[Floats, Floats, Floats | None]:
    """Return a table, hidden states and a bias."""
    width = int(rng.integers(3, 700))
    table, hidden = rng.normal(size=(200, width)), rng.normal(size=(4, width))
    bias: Floats | None = rng.normal(size=200).astype(np.float32) if kind == "bias" else None
    if kind == "outliers":  # in rows, columns, and hidden states
        table[rng.integers(200, size=9)] *= 100
        table[:, rng.integers(width)] *= 1000
        hidden[:, rng.integers(width)] *= 50
    elif kind == "zeros":
        table[::3], hidden[0], hidden[:, ::2] = 0, 0, 0
    elif kind == "tiny":
        table *= 1e-30
    elif kind == "equal signs":  # sums that cancel nothing
        table, hidden = abs(table) + 5, abs(hidden) + 5
    return table.astype(np.float32), hidden.astype(np.float32), bias


@pytest.mark.parametrize("kind", ["normal", "bias", "outliers", "zeros", "tiny", "equal signs"])
@pytest.mark.parametrize("seed", range(10))
def test_no_logit_is_above_its_bound(kind: str, seed: int) -> None:
    table, hidden, bias = drawn(kind, np.random.default_rng(seed))
    found, read = ranking_table(table, bias), rounded(hidden)
    assert found.values.dtype == np.int8
    assert abs(found.values).max() <= 63, "two products with a uint8 must fit 16 bits"
    wide = found.values.T * found.scales[:, None].astype(np.float64)
    norms = np.stack((np.linalg.norm(hidden, axis=1), np.linalg.norm(hidden - read, axis=1)), 1).astype(np.float32)
    product = (read.astype(np.float64) @ wide.T).astype(np.float32)
    bounds = product + (norms.max(0) @ found.bounds + found.bias).astype(np.float32)
    exact = hidden.astype(np.float64) @ table.T.astype(np.float64)
    in_order = np.zeros(exact.shape, np.float32)
    for column in range(table.shape[1]):  # the order with the largest rounding error
        in_order += hidden[:, column, None] * table[:, column]
    for logits in (exact, hidden @ table.T, in_order):
        assert (logits + (0 if bias is None else bias) <= bounds).all()


def test_bounds_are_close_enough_to_rank() -> None:
    table, hidden, _ = drawn("normal", np.random.default_rng(3))
    found, read = ranking_table(table, None), rounded(hidden)
    norms = np.stack((np.linalg.norm(hidden, axis=1), np.linalg.norm(hidden - read, axis=1)), 1)
    spread = (hidden @ table.T).std()
    assert (norms @ found.bounds < 0.8 * spread).all()
