"""8-bit products are exact on every CPU: the stored probe, and products of the runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper, numpy_helper

from tfexport.errors import BackendError
from tfexport.runtime.ort import int8_products
from tfexport.runtime.ort._device import OrtDevice
from tfexport.runtime.ort.int8_products import EXPECTED, INPUTS, OUTPUTS, PROBE, int8_session_options

BLOCK = 32


def blocks(bits: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return values and zero points of MatMulNBits for weights ±(2^(bits-1) - 1), the sign by output."""
    largest = 2 ** (bits - 1) - 1
    zero = 2 ** (bits - 1)
    values = np.where(np.arange(OUTPUTS)[:, None] % 2, zero - largest, zero + largest) * np.ones((1, INPUTS), int)
    values, zeros = values.astype(np.uint8), np.full((OUTPUTS, INPUTS // BLOCK), zero, np.uint8)
    if bits == 4:
        values = values[:, ::2] | values[:, 1::2] << 4
        zeros = zeros[:, ::2] | zeros[:, 1::2] << 4
    return values.reshape(OUTPUTS, INPUTS // BLOCK, -1), zeros


def probe() -> ModelProto:
    """Write the graph that is stored next to the runtime."""
    signed = np.where(np.arange(OUTPUTS) % 2, -127, 127).astype(np.int8)
    arrays: dict[str, NDArray[Any]] = {
        "weight": np.repeat(signed[None], INPUTS, 0),
        "one": np.array(1, np.float32),
        "zero": np.array(0, np.uint8),
        "output_scale": np.ones(OUTPUTS, np.float32),
        "block_scale": np.ones((OUTPUTS, INPUTS // BLOCK), np.float32),
    }
    contrib: dict[str, Any] = {"domain": "com.microsoft"}
    read = ["bytes", "weight", "one", "output_scale", "zero"]
    nodes = [helper.make_node("MatMulIntegerToFloat", read, ["integers"], **contrib)]
    for bits in (8, 4):
        arrays[f"values{bits}"], arrays[f"zeros{bits}"] = blocks(bits)
        shape = {"K": INPUTS, "N": OUTPUTS, "bits": bits, "block_size": BLOCK, "accuracy_level": 4}
        read = ["floats", f"values{bits}", "block_scale", f"zeros{bits}"]
        nodes.append(helper.make_node("MatMulNBits", read, [f"blocks{bits}"], **contrib, **shape))
    inputs = [("bytes", TensorProto.UINT8, INPUTS), ("floats", TensorProto.FLOAT, INPUTS)]
    return model_of(nodes, inputs, [(name, TensorProto.FLOAT, OUTPUTS) for name in EXPECTED], arrays)


def model_of(nodes: Any, inputs: Any, outputs: Any, arrays: dict[str, NDArray[Any]]) -> ModelProto:
    """Make a model of inputs and outputs (name, type, width)."""
    graph = helper.make_graph(
        nodes,
        "int8_products",
        *(
            [helper.make_tensor_value_info(name, kind, ["rows", width]) for name, kind, width in side]
            for side in (inputs, outputs)
        ),
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def test_the_stored_graph_is_the_one_written_here() -> None:
    assert PROBE.read_bytes() == probe().SerializeToString(deterministic=True)


def test_the_runtime_multiplies_exactly(tmp_path: Path) -> None:
    """Random factors over the whole range, 1 to 64 rows, against NumPy's integers."""
    rng = np.random.default_rng(0)
    weight = rng.integers(-127, 128, (256, 48)).astype(np.int8)
    arrays = {
        "weight": weight,
        "one": np.array(1, np.float32),
        "zero": np.array(0, np.uint8),
        "scales": np.ones(48, np.float32),
    }
    node = helper.make_node(
        "MatMulIntegerToFloat", ["x", "weight", "one", "scales", "zero"], ["y"], domain="com.microsoft"
    )
    model = model_of([node], [("x", TensorProto.UINT8, 256)], [("y", TensorProto.FLOAT, 48)], arrays)
    path = tmp_path / "g.onnx"
    path.write_bytes(model.SerializeToString())
    session = OrtDevice("cpu", weights="int8").load(path, "g", 1)
    for rows in (1, 2, 7, 64):
        x = rng.choice([0, 255, 128, 254], (rows, 256)).astype(np.uint8)
        np.testing.assert_array_equal(session.run(None, {"x": x})[0], x.astype(int) @ weight.astype(int))


def test_the_fastest_kernels_are_used_if_they_are_exact() -> None:
    """The option is set exactly if this CPU saturates without it."""
    session = ort.InferenceSession(PROBE.read_bytes())
    inputs = {"bytes": np.full((1, INPUTS), 255, np.uint8), "floats": np.full((1, INPUTS), 127, np.float32)}
    saturates = session.run(["integers"], inputs)[0][0, 0] < 0.9 * EXPECTED["integers"]
    assert bool(int8_session_options()) == saturates


def test_wrong_products_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that multiplies wrongly cannot be had here, so the expectation is made wrong."""
    monkeypatch.setattr(int8_products, "EXPECTED", {**EXPECTED, "blocks4": 0.0})
    int8_session_options.cache_clear()
    with pytest.raises(BackendError):
        int8_session_options()
    int8_session_options.cache_clear()
