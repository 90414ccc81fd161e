"""Candidates with equal logits are in order of id."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tests.runtime.exported import VOCAB, Once, exported, planted, ranked
from tfexport.runtime.ort._device import OrtDevice, OrtGraphs, Step
from tfexport.runtime.ort._providers import CUDA
from tfexport.runtime.session import Candidates, in_order_of_id


def test_candidates_of_a_device_are_sorted(once: Once) -> None:
    """The outputs of a step have ties in order of id mod 256, as the radix selection of ONNX Runtime CUDA."""
    model, row = planted(VOCAB, levels=5)
    graphs, spec = exported(model, once)
    device = OrtDevice("cpu")
    decoder = device.load(graphs["decoder_static"], "decoder_static.onnx", 1)
    step = Step(OrtGraphs(spec, device, None, decoder, None), 2, VOCAB)
    ids = np.arange(VOCAB)
    radix = np.tile(np.lexsort((ids // 256, ids % 256, -row)), (2, 1))
    assert (radix[0] != ranked(row)).any()
    step._token_ids.update_inplace(radix)
    step._logits.update_inplace(row[radix])
    step._log_normalizer.update_inplace(np.array([[1], [2]], np.float32))
    np.testing.assert_array_equal(step.candidates().token_ids, radix)
    device.provider = CUDA
    found = step.candidates()
    np.testing.assert_array_equal(found.token_ids, np.tile(ranked(row), (2, 1)))
    np.testing.assert_array_equal(found.logits, row[found.token_ids])
    np.testing.assert_array_equal(found.log_normalizer, [1, 2])


@given(
    rows=arrays.arrays(
        np.float32,
        arrays.array_shapes(min_dims=2, max_dims=3, max_side=9),
        elements=st.sampled_from([-np.inf, -2.5, -0.0, 0.0, 1.0, 3e38]),
    ),
    seed=st.integers(0, 2**32 - 1),
)
def test_candidates_are_in_the_order_of_lexsort(rows: np.ndarray, seed: int) -> None:
    ids = np.random.default_rng(seed).permuted(np.tile(np.arange(rows.shape[-1]), (*rows.shape[:-1], 1)), axis=-1)
    logits = -np.sort(-rows)
    given = Candidates(ids, logits, np.zeros(rows.shape[:-1], np.float32))
    before = replace(given, token_ids=ids.copy(), logits=logits.copy())
    found = in_order_of_id(given)
    order = np.lexsort((ids, -logits))
    np.testing.assert_array_equal(found.token_ids, np.take_along_axis(ids, order, -1))
    np.testing.assert_array_equal(found.logits, logits)
    np.testing.assert_array_equal(given.token_ids, before.token_ids)
    np.testing.assert_array_equal(given.logits, before.logits)


def test_without_ties_nothing_is_copied() -> None:
    ids = np.array([[5, 3, 4]])
    logits = cast(np.ndarray, np.array([[3, np.nan, 1]], np.float32))
    given = Candidates(ids, logits, np.zeros(1, np.float32))
    assert in_order_of_id(given) is given
