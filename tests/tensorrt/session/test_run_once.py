"""An engine that runs once returns what ONNX Runtime computes, and frees everything."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from tests.tensorrt.cuda_double import CudaDouble
from tests.tensorrt.session.conftest import Model
from tests.tensorrt.session.trt_double import MODULE, make_engines
from tfexport.contract import ENCODER, graph_contract
from tfexport.errors import BackendError
from tfexport.tensorrt.config import EngineConfig, cache_aliases
from tfexport.tensorrt.session.run_once import run_once

LIBRARY: Any = SimpleNamespace(trt=MODULE, dtype_name=lambda name: name)
DIMS = {"rows": 2, "batch": 2, "target_len": 1, "source_len": 3, "capacity": 16, "num_candidates": 4}


def arrays(model: Model, plan: str) -> dict[str, Any]:
    """Draw inputs of a graph."""
    rng, found = np.random.default_rng(0), {}
    for tensor in graph_contract(model.spec, plan).inputs:
        shape = [dim if isinstance(dim, int) else DIMS[dim] for dim in tensor.shape]
        draw = {"float32": lambda s: rng.normal(size=s), "bool": np.ones}.get(
            tensor.dtype, lambda s: rng.integers(3, 9, s)
        )
        found[tensor.name] = draw(shape).astype(tensor.dtype)
    return found | ({"num_candidates": np.array([4])} if plan != ENCODER else {})


@pytest.mark.parametrize("plan", [ENCODER, "decoder_static"])
def test_outputs_are_those_of_onnxruntime(dates: Model, plan: str) -> None:
    cuda, log = CudaDouble(), list[str]()
    engines, _ = make_engines(dates.graphs, dates.spec, "static", EngineConfig(max_batch=4), cuda, log)
    inputs, aliases, held = arrays(dates, plan), cache_aliases(plan, dates.spec, "static"), cuda.device_bytes
    given = {name: array.copy() for name, array in inputs.items()}
    device: Any = cuda
    found = run_once(plan, engines[plan], LIBRARY, device, inputs, aliases=aliases, reason=lambda: "; ".join(log))
    session = ort.InferenceSession(dates.graphs[plan], providers=["CPUExecutionProvider"])
    expected = dict(zip([o.name for o in session.get_outputs()], session.run(None, given), strict=True))
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-5, atol=1e-5)
    for name, array in given.items():
        np.testing.assert_array_equal(inputs[name], array)
    assert cuda.device_bytes == held


def test_a_refusal_frees_everything(dates: Model) -> None:
    cuda, log = CudaDouble(), list[str]()
    engines, _ = make_engines(dates.graphs, dates.spec, "static", EngineConfig(max_batch=1), cuda, log)
    device: Any = cuda
    with pytest.raises(BackendError, match="outside the profile"):
        run_once(ENCODER, engines[ENCODER], LIBRARY, device, arrays(dates, ENCODER), aliases={}, reason=lambda: log[-1])
    assert cuda.device_bytes == 0
