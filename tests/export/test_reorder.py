"""Rows of a cache in a new order: numpy's take, and an engine for each precision."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfexport.export.reorder import reorder_graph
from tfexport.precision import Precision

PRECISIONS: tuple[Precision, ...] = ("fp32", "fp16", "bf16")


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


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_graph_is_plain_onnx(precision: Precision) -> None:
    raw = reorder_graph(precision)
    assert raw == reorder_graph(precision)
    model = onnx.load_from_string(raw)
    onnx.checker.check_model(model, full_check=True)
    assert [entry.version for entry in model.opset_import] == [18]
    assert model.ir_version <= 8
    assert not model.graph.value_info


@pytest.mark.parametrize("precision", PRECISIONS)
def test_tensorrt_builds_it_for_any_number_of_rows(precision: Precision) -> None:
    trt = pytest.importorskip("tensorrt_rtx")
    log = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(log)
    network = builder.create_network(0)
    parser: Any = trt.OnnxParser(network, log)
    assert parser.parse(reorder_graph(precision))
    assert network.get_input(0).dtype == network.get_output(0).dtype
    profile = builder.create_optimization_profile()
    profile.set_shape("cache", (1, 64), (8, 4096), (32, 1 << 20))
    profile.set_shape("order", (1,), (8,), (32,))
    settings = builder.create_builder_config()
    assert settings.add_optimization_profile(profile) == 0
    assert builder.build_serialized_network(network, settings) is not None
