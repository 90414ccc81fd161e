"""Passes over small graphs made by hand: what changes, what stays, and that the results are equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from tfexport.export._weights import write_weights
from tfexport.export.graph_file import span
from tfexport.export.passes import (
    append_selection,
    collapse_reshapes,
    join_products,
    separate_bias,
    separate_lookups,
)
from tfexport.export.reorder import reorder_graph
from tfexport.precision import Precision

RNG = np.random.default_rng(0)


def constant(name: str, array: Any) -> ir.Value:
    return ir.Value(name=name, const_value=ir.tensor(np.asarray(array), name=name))


def output(value: ir.Value, name: str, *shape: int | str) -> ir.Value:
    value.name, value.type, value.shape = name, ir.TensorType(ir.DataType.FLOAT), ir.Shape(shape)
    return value


def model_of(x: ir.Value, outputs: list[ir.Value], nodes: list[ir.Node], *weights: ir.Value) -> ir.Model:
    graph = ir.Graph([x], outputs, nodes=nodes, initializers=weights, opset_imports={"": 18}, name="g")
    return ir.Model(graph, ir_version=10)


def run(model: ir.Model, **inputs: Any) -> Any:
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    return ort.InferenceSession(proto.SerializeToString()).run(None, inputs)


def operators(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


# ---- the selection of tokens

VOCAB = 32_000
ROWS = {
    "usual": RNG.normal(size=VOCAB) * 4,
    "all equal": np.full(VOCAB, 3.0),
    "all 10,000": np.full(VOCAB, 1e4),
    "all -10,000": np.full(VOCAB, -1e4),
    "from -10,000 to 10,000": np.linspace(-1e4, 1e4, VOCAB),
    "one of 10,000": np.where(np.arange(VOCAB) == 17, 1e4, 0.0),
    "one that is impossible": np.where(np.arange(VOCAB) == 17, -1e4, 0.0),
    "the last of the float range": np.where(np.arange(VOCAB) == 17, 3e38, -3e38),
    "hardly apart": 1e-7 * np.arange(VOCAB),
    "few values": RNG.integers(0, 40, VOCAB).astype(float),
}


@pytest.fixture(scope="module", params=[None, VOCAB, VOCAB - 1])
def selection(request: pytest.FixtureRequest) -> ort.InferenceSession:
    """Select from the whole vocabulary, or in blocks, which may not divide it."""
    vocab = request.param or VOCAB
    given = ir.val("given", ir.DataType.FLOAT, ["rows", vocab])
    node = ir.Node("", "Identity", [given])
    model = model_of(given, [output(node.outputs[0], "logits", "rows", vocab)], [node])
    append_selection(model, by_blocks=request.param is not None)
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    return ort.InferenceSession(proto.SerializeToString())


def select(session: ort.InferenceSession, logits: np.ndarray, count: int) -> Any:
    names = ["candidate_ids", "candidate_logits", "log_normalizer"]
    return session.run(names, {"given": logits, "num_candidates": np.array([count])})


@pytest.mark.parametrize("count", [1, 8, VOCAB])
def test_selection_is_that_of_numpy_in_float64(selection: ort.InferenceSession, count: int) -> None:
    vocab = selection.get_inputs()[0].shape[1]
    count, logits = min(count, vocab), np.stack(list(ROWS.values()))[:, :vocab].astype(np.float32)
    ids, best, normalizer = select(selection, logits, count)
    wide = logits.astype(np.float64)
    np.testing.assert_array_equal(ids, np.argsort(-wide, axis=1, kind="stable")[:, :count])
    np.testing.assert_array_equal(best, np.take_along_axis(logits, ids, 1))
    most = wide.max(1, keepdims=True)
    expected = most + np.log(np.exp(wide - most).sum(1, keepdims=True))
    np.testing.assert_allclose(normalizer, expected, rtol=3e-7, atol=2e-6)


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 17, VOCAB - 1])
def test_values_that_are_not_finite_affect_only_their_row(
    wrong: float, place: int, selection: ort.InferenceSession
) -> None:
    """A decode that goes on from NaN would look like any other."""
    logits = np.stack([ROWS["usual"]] * 3)[:, : selection.get_inputs()[0].shape[1]].astype(np.float32)
    logits[1, min(place, logits.shape[1] - 1)] = wrong
    normalizer = select(selection, logits, 4)[2][:, 0]
    assert np.isfinite(normalizer).tolist() == [True, False, True]


# ---- reshapes


def test_reshapes_collapse_and_other_readers_keep_their_input() -> None:
    x = ir.val("x", ir.DataType.FLOAT, ["tokens", 6])
    shapes = [constant("heads", [-1, 2, 3]), constant("rows", [2, -1, 2, 3]), constant("flat", [-1])]
    heads = ir.Node("", "Reshape", [x, shapes[0]])
    rows = ir.Node("", "Reshape", [heads.outputs[0], shapes[1]])
    flat = ir.Node("", "Reshape", [rows.outputs[0], shapes[2]])
    less = ir.Node("", "Neg", [heads.outputs[0]])
    outputs = [output(flat.outputs[0], "y", "n"), output(less.outputs[0], "z", "n", 2, 3)]
    model = model_of(x, outputs, [heads, rows, flat, less], *shapes)
    collapse_reshapes(model)
    assert operators(model) == ["Reshape", "Reshape", "Neg"]
    assert flat.inputs[0] is x
    assert "rows" not in model.graph.initializers
    tokens = np.arange(24, dtype=np.float32).reshape(4, 6)
    y, z = run(model, x=tokens)
    assert np.array_equal(y, tokens.ravel())
    assert np.array_equal(z, -tokens.reshape(4, 2, 3))


def test_a_reshape_that_copies_a_size_of_its_input_stays() -> None:
    x = ir.val("x", ir.DataType.FLOAT, ["tokens", 6])
    shapes = [constant("heads", [-1, 2, 3]), constant("first", [0, 6])]
    heads = ir.Node("", "Reshape", [x, shapes[0]])
    first = ir.Node("", "Reshape", [heads.outputs[0], shapes[1]])
    model = model_of(x, [output(first.outputs[0], "y", "n", 6)], [heads, first], *shapes)
    collapse_reshapes(model)
    assert operators(model) == ["Reshape", "Reshape"]


# ---- products

D, HEADS, WIDTH, TOKENS = 6, 2, 3, 5
X = np.random.default_rng(1).normal(size=(TOKENS, D)).astype(np.float32)


def attention_input(
    *, bias: bool = True, negated_key: bool = False, other_input: bool = False, other_reader: bool = False
) -> ir.Model:
    """Return a graph that computes query, key and value and concatenates their heads."""
    x = ir.val("x", ir.DataType.FLOAT, ["tokens", D])
    heads, whole = constant("heads", [-1, HEADS, WIDTH]), constant("whole", [-1, 3 * HEADS * WIDTH])
    nodes, parts, weights = [], [], [heads, whole]
    for part in "qkv":
        source = x
        if other_input and part == "v":
            nodes.append(ir.Node("", "Neg", [x]))
            source = nodes[-1].outputs[0]
        operands = [constant(f"a.{part}.weight", RNG.normal(size=(HEADS * WIDTH, D)).astype(np.float32))]
        operands += [constant(f"a.{part}.bias", RNG.normal(size=HEADS * WIDTH).astype(np.float32))] * bias
        weights += operands
        nodes.append(ir.Node("", "Gemm", [source, *operands], [ir.AttrInt64("transB", 1)]))
        nodes.append(ir.Node("", "Reshape", [nodes[-1].outputs[0], heads]))
        if negated_key and part == "k":
            nodes.append(ir.Node("", "Neg", [nodes[-1].outputs[0]]))
        parts.append(nodes[-1].outputs[0])
    concat = ir.Node("", "Concat", parts, [ir.AttrInt64("axis", 1)])
    joined = concat.outputs[0]
    nodes += [concat, ir.Node("", "Neg", [joined]) if other_reader else ir.Node("", "Reshape", [joined, whole])]
    y = output(nodes[-1].outputs[0], "y", *(["n", "h", "w"] if other_reader else ["n", "w"]))
    return model_of(x, [y], nodes, *weights)


@pytest.mark.parametrize("bias", [True, False])
def test_three_products_become_one_over_joined_weights(bias: bool) -> None:
    model = attention_input(bias=bias)
    (expected,) = run(model, x=X)
    parts = {name: value.const_value.numpy() for name, value in model.graph.initializers.items() if value.const_value}
    join_products(model)
    assert operators(model) == ["Gemm", "Reshape"]
    np.testing.assert_allclose(run(model, x=X)[0], expected, rtol=1e-6)
    for kind in ("weight", "bias")[: 1 + bias]:
        joined = model.graph.initializers[f"a.{kind}"].const_value
        assert joined is not None
        assert np.array_equal(joined.numpy(), np.concatenate([parts[f"a.{part}.{kind}"] for part in "qkv"]))
    assert set(model.graph.initializers) == {"whole", "a.weight", *(["a.bias"] if bias else [])}


@pytest.mark.parametrize("case", ["negated_key", "other_input", "other_reader"])
def test_other_products_stay(case: str) -> None:
    """Keys with rotated positions, a product of another input, a reader that needs the heads."""
    model = attention_input(**{case: True})
    before, expected = operators(model), run(model, x=X)
    join_products(model)
    assert operators(model) == before
    assert np.array_equal(run(model, x=X), expected)


# ---- the weight file


def matmuls(weight: Any) -> ir.Model:
    """Return the graph y = z = x · weight, with the weight inside."""
    x, inner = ir.val("x", ir.DataType.FLOAT, ["rows", len(weight)]), constant("w", weight)
    nodes = [ir.Node("", "MatMul", [x, inner]) for _ in range(2)]
    outputs = [output(node.outputs[0], name, "rows", weight.shape[1]) for name, node in zip("yz", nodes, strict=True)]
    return model_of(x, outputs, nodes, inner)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_weight_is_stored_once_as_the_model_has_it(tmp_path: Path, transposed: bool) -> None:
    weight = torch.arange(20.0).reshape(4, 5) if transposed else torch.arange(20.0).reshape(5, 4)
    used, rows = weight.numpy().T.copy() if transposed else weight.numpy(), np.ones((2, 5), np.float32)
    models = [matmuls(used), matmuls(used)]
    write_weights(tmp_path / "weights.safetensors", {"fc.weight": weight}, models)
    assert np.array_equal(load_file(tmp_path / "weights.safetensors")["fc.weight"], weight.numpy())
    for model in models:
        (stored,) = written(tmp_path, model).graph.initializer
        assert stored.data_location == onnx.TensorProto.EXTERNAL
        for found in ort.InferenceSession(tmp_path / "g.onnx").run(None, {"x": rows}):
            assert np.array_equal(found, rows @ used)


def test_a_constant_that_is_no_parameter_stays_in_the_graph(tmp_path: Path) -> None:
    value = np.ones((5, 4), np.float32)
    model = matmuls(value)
    write_weights(tmp_path / "weights.safetensors", {"fc.weight": torch.zeros(4, 5)}, [model])
    (stored,) = written(tmp_path, model).graph.initializer
    assert np.array_equal(onnx.numpy_helper.to_array(stored), value)


TABLE = torch.randn(7, 4, generator=torch.Generator().manual_seed(0))
IDS = np.array([3, 0, 6])


def lookup(*, looked_up: bool = True, multiplied: bool = True) -> ir.Model:
    ids = ir.val("ids", ir.DataType.INT64, ["tokens"])
    table, other = constant("table", TABLE.numpy()), constant("other", TABLE.numpy() + 1)
    found = ir.Node("", "Gather", [table if looked_up else other, ids])
    scores = ir.Node("", "Gemm", [found.outputs[0], table if multiplied else other], [ir.AttrInt64("transB", 1)])
    used = [table] * (looked_up or multiplied) + [other] * (not (looked_up and multiplied))
    return model_of(ids, [output(scores.outputs[0], "y", "tokens", 7)], [found, scores], *used)


def written(folder: Path, model: ir.Model) -> onnx.ModelProto:
    ir.save(model, folder / "g.onnx")
    onnx.checker.check_model(str(folder / "g.onnx"), full_check=True)
    return onnx.load(str(folder / "g.onnx"), load_external_data=False)


def test_a_lookup_gets_its_own_name_for_the_same_bytes(tmp_path: Path) -> None:
    model = lookup()
    write_weights(tmp_path / "weights.safetensors", {"table": TABLE}, [model])
    size = (tmp_path / "weights.safetensors").stat().st_size
    separate_lookups(model)
    proto = written(tmp_path, model)
    assert {node.op_type: [*node.input] for node in proto.graph.node}["Gather"] == ["table.rows", "ids"]
    weights = model.graph.initializers
    assert span(weights["table"]) == span(weights["table.rows"])
    assert (tmp_path / "weights.safetensors").stat().st_size == size
    (found,) = ort.InferenceSession(tmp_path / "g.onnx").run(None, {"ids": IDS})
    np.testing.assert_allclose(found, (TABLE[torch.tensor(IDS)] @ TABLE.T).numpy(), rtol=1e-6)


@pytest.mark.parametrize("case", ["looked_up", "multiplied", "inside"])
def test_a_table_with_one_kind_of_reader_or_inside_the_graph_stays(tmp_path: Path, case: str) -> None:
    model = lookup(**({} if case == "inside" else {case: False}))
    if case != "inside":
        write_weights(tmp_path / "weights.safetensors", {"table": TABLE}, [model])
    before = written(tmp_path, model)
    separate_lookups(model)
    assert written(tmp_path, model) == before


# ---- the bias of a large vocabulary


def projection(vocab: int, *, nested: bool) -> ir.Model:
    """Return the graph logits = x · weightᵀ + bias, inside a branch of an If or not."""
    x, flag = ir.val("x", ir.DataType.FLOAT, ["rows", 4]), constant("flag", np.array(True))
    operands = [constant("w", RNG.normal(size=(vocab, 4)).astype(np.float32))]
    operands.append(constant("b", RNG.normal(size=vocab).astype(np.float32)))
    nodes = [ir.Node("", "Gemm", [x, *operands], [ir.AttrInt64("transB", 1)])]
    if nested:
        output(nodes[0].outputs[0], "inner", "rows", vocab)
        other = ir.Node("", "Identity", [operands[0]])
        output(other.outputs[0], "table", vocab, 4)
        branches = [ir.Graph([], node.outputs, nodes=[node], name=node.op_type) for node in (nodes[0], other)]
        names = ("then_branch", "else_branch")
        nodes = [ir.Node("", "If", [flag], [ir.AttrGraph(*one) for one in zip(names, branches, strict=True)])]
    outputs = [output(nodes[0].outputs[0], "logits", "n", "width")]
    return model_of(x, outputs, nodes, *operands, *([flag] if nested else []))


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(("vocab", "products"), [(11_999, ["Gemm"]), (12_000, ["Gemm", "Add"])])
def test_the_bias_of_a_large_vocabulary_gets_its_own_operator(
    tmp_path: Path, vocab: int, products: list[str], nested: bool
) -> None:
    model, rows = projection(vocab, nested=nested), RNG.normal(size=(3, 4)).astype(np.float32)
    weight, bias = (
        value.const_value.numpy() for value in [*model.graph.initializers.values()][:2] if value.const_value
    )
    write_weights(tmp_path / "weights.safetensors", {"w": torch.tensor(weight), "b": torch.tensor(bias)}, [model])
    separate_bias(model)
    written(tmp_path, model)
    found = [node.op_type for node in model.graph.all_nodes() if node.op_type not in ("If", "Identity")]
    assert found == products
    (logits,) = ort.InferenceSession(tmp_path / "g.onnx").run(["logits"], {"x": rows})
    np.testing.assert_allclose(logits, rows.astype(np.float64) @ weight.T.astype(np.float64) + bias, atol=2e-6)


# ---- the graph that reorders rows


@pytest.fixture(scope="module")
def sessions() -> dict[str, ort.InferenceSession]:
    return {dtype: ort.InferenceSession(reorder_graph(p)) for p, dtype in (("fp32", "float32"), ("fp16", "float16"))}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@settings(max_examples=25, deadline=None)
@given(order=st.lists(st.integers(0, 3), min_size=1, max_size=9), width=st.integers(1, 70))
def test_rows_are_taken_as_numpy_takes_them(
    sessions: dict[str, ort.InferenceSession], dtype: str, order: list[int], width: int
) -> None:
    cache = np.random.default_rng(0).standard_normal((4, width)).astype(dtype)
    (found,) = sessions[dtype].run(None, {"cache": cache, "order": np.array(order)})
    assert found.dtype == cache.dtype
    np.testing.assert_array_equal(found, cache.take(order, axis=0))


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_the_reorder_graph_is_plain_onnx(precision: Precision) -> None:
    raw = reorder_graph(precision)
    assert raw == reorder_graph(precision)
    model = onnx.load_from_string(raw)
    onnx.checker.check_model(model, full_check=True)
    assert [entry.version for entry in model.opset_import] == [18]
    assert model.ir_version <= 8
