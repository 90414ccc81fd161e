"""Rows of a cache in a new order, as numpy takes them."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfexport.export.reorder import reorder_graph
from tfexport.precision import Precision


@pytest.fixture(scope="module")
def sessions() -> dict[str, ort.InferenceSession]:
    return {dtype: ort.InferenceSession(reorder_graph(p)) for p, dtype in (("fp32", "float32"), ("fp16", "float16"))}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@settings(max_examples=25, deadline=None)
@given(order=st.lists(st.integers(0, 3), min_size=1, max_size=9), width=st.integers(1, 70))
def test_rows_are_taken_as_numpy_takes_them(
    sessions: dict[str, ort.InferenceSession], dtype: str, order: list[int], width: int
) -> None:
    """Among them duplicates, fewer rows and more."""
    cache = np.random.default_rng(0).standard_normal((4, width)).astype(dtype)
    (found,) = sessions[dtype].run(None, {"cache": cache, "order": np.array(order)})
    assert found.dtype == cache.dtype
    np.testing.assert_array_equal(found, cache.take(order, axis=0))


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_the_graph_is_plain_onnx(precision: Precision) -> None:
    raw = reorder_graph(precision)
    assert raw == reorder_graph(precision)
    model = onnx.load_from_string(raw)
    onnx.checker.check_model(model, full_check=True)
    assert [entry.version for entry in model.opset_import] == [18]
    assert model.ir_version <= 8
    assert not model.graph.value_info
