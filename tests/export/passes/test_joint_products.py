"""Products of one input side by side become one, and nothing else does."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from tfexport.export.passes import join_products

D, HEADS, WIDTH, TOKENS = 6, 2, 3, 5
RNG = np.random.default_rng(0)


def weight(name: str, *shape: int) -> ir.Value:
    return ir.Value(name=name, const_value=ir.tensor(RNG.normal(size=shape).astype(np.float32), name=name))


def attention_input(*, bias: bool = True, turned: bool = False, other: bool = False, kept: bool = False) -> ir.Model:
    """Query, key and value side by side; `turned` puts a node between, `other` another input, `kept` another reader."""
    x = ir.val("x", ir.DataType.FLOAT, ["tokens", D])
    heads = ir.Value(name="heads", const_value=ir.tensor(np.array([-1, HEADS, WIDTH]), name="heads"))
    whole = ir.Value(name="whole", const_value=ir.tensor(np.array([-1, 3 * HEADS * WIDTH]), name="whole"))
    nodes, parts, weights = [], [], [heads, whole]
    for part in "qkv":
        source = x
        if other and part == "v":
            nodes.append(ir.Node("", "Neg", [x]))
            source = nodes[-1].outputs[0]
        operands = [weight(f"a.{part}.weight", HEADS * WIDTH, D)] + ([weight(f"a.{part}.bias", HEADS * WIDTH)] * bias)
        weights += operands
        nodes.append(ir.Node("", "Gemm", [source, *operands], [ir.AttrInt64("transB", 1)]))
        nodes.append(ir.Node("", "Reshape", [nodes[-1].outputs[0], heads]))
        if turned and part == "k":
            nodes.append(ir.Node("", "Neg", [nodes[-1].outputs[0]]))
        parts.append(nodes[-1].outputs[0])
    concat = ir.Node("", "Concat", parts, [ir.AttrInt64("axis", 1)])
    nodes += [concat, ir.Node("", "Neg" if kept else "Reshape", [concat.outputs[0]] + [whole] * (not kept))]
    y = nodes[-1].outputs[0]
    y.name, y.type, y.shape = "y", ir.TensorType(ir.DataType.FLOAT), ir.Shape(["n", "h", "w"] if kept else ["n", "w"])
    graph = ir.Graph([x], [y], nodes=nodes, initializers=weights, opset_imports={"": 18}, name="g")
    return ir.Model(graph, ir_version=10)


def run(model: ir.Model) -> Any:
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    x = np.random.default_rng(1).normal(size=(TOKENS, D)).astype(np.float32)
    return ort.InferenceSession(proto.SerializeToString()).run(None, {"x": x})[0]


def operators(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


@pytest.mark.parametrize("bias", [True, False])
def test_three_products_become_one_over_joined_weights(bias: bool) -> None:
    model = attention_input(bias=bias)
    expected = run(model)
    parts = {name: value.const_value.numpy() for name, value in model.graph.initializers.items() if value.const_value}
    join_products(model)
    assert operators(model) == ["Gemm", "Reshape"]
    np.testing.assert_allclose(run(model), expected, rtol=1e-6)
    for kind in ("weight", "bias")[: 1 + bias]:
        joined = model.graph.initializers[f"a.{kind}"].const_value
        assert joined is not None
        assert np.array_equal(joined.numpy(), np.concatenate([parts[f"a.{part}.{kind}"] for part in "qkv"]))
    assert set(model.graph.initializers) == {"whole", "a.weight", *(["a.bias"] if bias else [])}


@pytest.mark.parametrize("case", ["turned", "other", "kept"])
def test_what_is_more_than_products_of_one_input_side_by_side_stays(case: str) -> None:
    """Keys that positions are turned into, a product of something else, a reader that needs the heads."""
    model = attention_input(**{case: True})
    before, expected = operators(model), run(model)
    join_products(model)
    assert operators(model) == before
    assert np.array_equal(run(model), expected)
