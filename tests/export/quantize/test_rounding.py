"""Rounding of a matrix: within half a step, and idempotent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray
from onnx import TensorProto, helper

from tfexport.export.quantize._rounding import BLOCK, Rounded, round_blocks, round_matrix
from tfexport.precision import WeightType

LARGEST = {"int8": 127, "int4": 7}
BFLOAT16 = helper.tensor_dtype_to_np_dtype(TensorProto.BFLOAT16)


def matrices(rows: int = 3, columns: int = 2 * BLOCK) -> st.SearchStrategy[NDArray[np.float32]]:
    weights = arrays.arrays(np.float32, (rows, columns), elements=st.floats(-4, 4, width=32))
    sizes = arrays.arrays(np.float32, (rows, 1), elements=st.sampled_from([0.0, 1e-12, 1e-5, 1e-3, 1.0, 1e3]))
    return st.builds(lambda weight, size: (weight * size).astype(np.float32), weights, sizes)


def steps(rounded: Rounded) -> NDArray[np.float64]:
    scales = rounded.scales.astype(np.float64)
    if rounded.block:
        return scales.repeat(rounded.block, rounded.axis)
    return scales[:, None] if rounded.axis == 0 else scales[None]


def restored(rounded: Rounded) -> NDArray[np.float64]:
    return rounded.values.astype(np.float64) * steps(rounded)


@pytest.mark.parametrize("outputs", [0, 1])
@pytest.mark.parametrize("dtype", ["float32", "float16", BFLOAT16])
@pytest.mark.parametrize("weights", LARGEST)
@settings(max_examples=20, deadline=None)
@given(matrix=matrices())
def test_every_weight_is_within_half_a_step_and_rounds_to_itself(
    weights: WeightType, dtype: Any, outputs: int, matrix: NDArray[np.float32]
) -> None:
    matrix = (matrix if outputs == 0 else matrix.T).astype(dtype)
    rounded = round_matrix(matrix, weights, outputs)
    assert rounded.scales.dtype == matrix.dtype
    assert (rounded.scales > 0).all()
    assert np.abs(rounded.values.astype(int)).max() <= LARGEST[weights]
    error = np.abs(restored(rounded) - matrix.astype(np.float64))
    assert (error <= (0.5 + 1e-6) * steps(rounded)).all()
    again = round_matrix(restored(rounded).astype(dtype), weights, outputs)
    moved = np.abs(again.values.astype(int) - rounded.values.astype(int)).max()
    # A product of 127 and a scale has more digits than bfloat16.
    assert moved <= (1 if dtype == BFLOAT16 and weights == "int8" else 0)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@settings(max_examples=20, deadline=None)
@given(matrix=matrices())
def test_fp8_keeps_three_digits_after_the_first(dtype: str, matrix: NDArray[np.float32]) -> None:
    matrix = matrix.astype(dtype)
    rounded = round_matrix(matrix, "fp8", 0)
    error, wide = np.abs(restored(rounded) - matrix.astype(np.float64)), np.abs(matrix.astype(np.float64))
    # Half of the last of three binary digits, and below 2^-6 half of its smallest number, 2^-9.
    assert (error <= np.maximum(wide * 2.0**-4, steps(rounded) * 2.0**-10) * (1 + 1e-6)).all()


@pytest.mark.parametrize("inputs", [BLOCK - 1, BLOCK + 1, 140])
def test_int4_becomes_int8_where_no_block_fits(inputs: int) -> None:
    rounded = round_matrix(np.ones((4, inputs), np.float32), "int4", 0)
    assert rounded.values.dtype == np.int8
    assert (rounded.block, rounded.axis, rounded.scales.shape) == (0, 0, (4,))


def unpacked(packed: NDArray[np.uint8], bits: int, count: int) -> NDArray[np.float64]:
    ones = np.unpackbits(packed, axis=-1, bitorder="little").reshape(*packed.shape[:-1], -1, bits)
    return (ones * 2.0 ** np.arange(bits)).sum(-1)[..., :count]


@pytest.mark.parametrize(("bits", "block"), [(8, 128), (8, 16), (4, 32), (4, 16)])
@settings(max_examples=20, deadline=None)
@given(matrix=matrices(columns=100))
def test_a_block_spans_its_weights_and_zero_stays_zero(bits: int, block: int, matrix: NDArray[np.float32]) -> None:
    blocks = round_blocks(matrix, bits, block)
    count = -(-100 // block)
    values, zeros = unpacked(blocks.values, bits, block), unpacked(blocks.zero_points, bits, count)
    assert (blocks.scales > 0).all()
    assert blocks.scales.shape == zeros.shape == (3, count)
    steps = blocks.scales.astype(np.float64)[..., None]
    found = ((values - zeros[..., None]) * steps).reshape(3, -1)[:, :100]
    # The zero point is rounded as well: an end of the range can be a whole step away, everything else half of one.
    limit = (1 + 1e-5) * np.broadcast_to(steps, (3, count, block)).reshape(3, -1)[:, :100]
    assert (np.abs(found - matrix) <= limit).all()
    assert (found[matrix == 0] == 0).all()
    inner = np.abs(found - matrix) <= 0.5 * limit
    assert inner.mean() >= 0.5


def test_blocks_of_nothing_and_of_huge_weights() -> None:
    """Zeros have a scale that can be divided by, and the range of what is nearly infinite does not overflow."""
    matrix = np.zeros((2, 32), np.float32)
    matrix[1, :2] = 3e38, -3e38
    for bits in (8, 4):
        blocks = round_blocks(matrix, bits, 32)
        assert np.isfinite(blocks.scales).all()
        values, zeros = unpacked(blocks.values, bits, 32)[:, 0], unpacked(blocks.zero_points, bits, 1)
        restored = (values - zeros) * blocks.scales.astype(np.float64)
        assert not restored[0].any()
        np.testing.assert_allclose(restored[1, :2], [3e38, -3e38], rtol=0.1)
