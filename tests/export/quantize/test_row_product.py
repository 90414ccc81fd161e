"""Products of integers: what NumPy computes by the same rule, row by row, and rounded once for all that read it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from tfexport.export.quantize.row_product import RowProducts
from tfexport.export.quantize.weight_quantize import round_matrix
from tfexport.runtime.ort.device import OrtDevice

INPUTS, OUTPUTS = 96, 80


def graph(*, relu: bool, products: int = 1) -> tuple[bytes, list[NDArray[np.float64]]]:
    """Write y{i} = (relu) x · W{i}; return it and each W as it is stored."""
    rng = np.random.default_rng(0)
    read = "positive" if relu else "x"
    before = [helper.make_node("Relu", ["x"], [read])] if relu else []
    empty = helper.make_graph(before, "g", [], [])
    rows, nodes, weights, matrices = RowProducts(empty), before, [], []
    for i in range(products):
        rounded = round_matrix(rng.standard_normal((OUTPUTS, INPUTS), np.float32), "int8", 0)
        arrays = {f"values{i}": rounded.values.T.copy(), f"scales{i}": rounded.scales}
        weights += [numpy_helper.from_array(array, name) for name, array in arrays.items()]
        nodes = [*nodes, *rows.multiply(read, *arrays, f"y{i}", f"product{i}")]
        matrices.append((rounded.values.astype(np.float64) * rounded.scales[:, None]).T)
    value = helper.make_tensor_value_info
    made = helper.make_graph(
        nodes,
        "g",
        [value("x", TensorProto.FLOAT, ["batch", "length", INPUTS])],
        [value(f"y{i}", TensorProto.FLOAT, ["batch", "length", OUTPUTS]) for i in range(products)],
        [*weights, *rows.constants()],
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(made, opset_imports=opsets, ir_version=10).SerializeToString(), matrices


def run(model: bytes, x: NDArray[np.float32]) -> Any:
    with tempfile.NamedTemporaryFile(suffix=".onnx") as file:
        file.write(model)
        file.flush()
        return OrtDevice("cpu", weights="int8").load(Path(file.name), "g", 1).run(None, {"x": x})


def reference(x: NDArray[np.float64], matrix: NDArray[np.float64], steps: int) -> NDArray[np.float64]:
    """Round each row to so many steps of its largest magnitude, and multiply."""
    largest = np.abs(x).max(-1, keepdims=True)
    return np.rint(x / np.where(largest == 0, 1, largest) * steps) / steps * largest @ matrix


@pytest.mark.parametrize(("relu", "steps"), [(False, 127), (True, 255)])
def test_the_product_is_that_of_the_rounded_rows(relu: bool, steps: int) -> None:
    """What is never negative has all 255 steps; rows of very different size, and one of zeros, are each exact."""
    model, (matrix,) = graph(relu=relu)
    x = np.random.default_rng(1).standard_normal((3, 7, INPUTS)).astype(np.float32)
    x *= np.geomspace(1e-20, 1e20, 21, dtype=np.float32).reshape(3, 7, 1)
    x[1, 2] = 0
    x[2, 3] = -np.abs(x[2, 3])  # of which a ReLU leaves zeros
    (found,) = run(model, x)
    read = (x.clip(0) if relu else x).astype(np.float64)
    expected = reference(read, matrix, steps)
    size = np.abs(expected).max(-1, keepdims=True) + 1e-30
    # A value between two steps may be rounded to the other one, in float32.
    step = np.abs(read).max(-1, keepdims=True) / steps * np.abs(matrix).max()
    assert (np.abs(found - expected) <= 1e-5 * size + step).all()
    assert np.median(np.abs(found - expected) / size) < 1e-6
    assert not found[1, 2].any()
    assert found[2, 3].any() != relu


def test_a_row_is_the_same_to_the_bit_whatever_lies_beside_it() -> None:
    model, _ = graph(relu=False)
    x = np.random.default_rng(2).standard_normal((5, 4, INPUTS)).astype(np.float32)
    x[1:] *= 1000
    (together,) = run(model, x)
    for row in range(5):
        np.testing.assert_array_equal(run(model, x[row : row + 1])[0][0], together[row])
    np.testing.assert_array_equal(run(model, x[:, :1])[0][:, 0], together[:, 0])


def test_an_activation_is_rounded_once_for_all_that_read_it() -> None:
    model, matrices = graph(relu=False, products=3)
    operators = [node.op_type for node in onnx.load_from_string(model).graph.node]
    assert operators.count("MatMulIntegerToFloat") == operators.count("Mul") == 3
    assert operators.count("QuantizeLinear") == operators.count("ReduceMax") == 1
    x = np.random.default_rng(3).standard_normal((2, 3, INPUTS)).astype(np.float32)
    for found, matrix in zip(run(model, x), matrices, strict=True):
        np.testing.assert_allclose(found, reference(x.astype(np.float64), matrix, 127), rtol=0, atol=0.05)
