"""Attention that TensorRT would compute wrongly is found wherever it hides, and what is right is left alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from tfexport.errors import GraphError
from tfexport.export.attention_check import attention_problems

CACHE = ["batch", 8, "past_len", 64]
MICROSOFT = "com.microsoft"


def value(name: str, shape: list[Any] | None, dtype: int = TensorProto.FLOAT16) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def model(*nodes: onnx.NodeProto, keys: str = "source_len", functions: Any = (), **more: list[Any]) -> onnx.ModelProto:
    """Return a graph of `nodes` over q [batch, 8, target_len, 64], k and v [batch, 8, keys, 64] and `more` inputs."""
    inputs = [value("q", ["batch", 8, "target_len", 64]), *(value(x, ["batch", 8, keys, 64]) for x in "kv")]
    inputs += [value(name, shape) for name, shape in more.items()]
    graph = helper.make_graph(list(nodes), "g", inputs, [value("y", None)])
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid(MICROSOFT, 1), helper.make_opsetid("own", 1)]
    return helper.make_model(graph, opset_imports=opsets, functions=functions)


def attention(*inputs: str, outputs: tuple[str, ...] = ("y",), op: str = "Attention", **attributes: Any) -> Any:
    return helper.make_node(op, ["q", "k", "v", *inputs], list(outputs), name="a", **attributes)


CAUSAL = attention(is_causal=1)
UNEQUAL = "is_causal although the number of queries and keys may differ"
PAST = "past and present"
BAD = {
    "is_causal": (model(CAUSAL), UNEQUAL),
    "present": (model(attention("", "pk", "pv", outputs=("y", "a", "b")), pk=CACHE, pv=CACHE), PAST),
    "past alone": (model(attention("", "pk", "pv"), pk=CACHE, pv=CACHE), PAST),
    "present alone": (model(attention(outputs=("y", "a", "b"))), PAST),
    "nonpad_kv_seqlen": (model(attention("", "", "", "n"), n=["batch"]), "nonpad_kv_seqlen"),
    "row mask": (model(attention("m"), m=["batch", 1, 1, "source_len"]), "one mask row for several queries"),
    "unidirectional": (
        model(attention(op="MultiHeadAttention", domain=MICROSOFT, num_heads=8, unidirectional=1)),
        UNEQUAL,
    ),
    "past of another domain": (
        model(attention("", "", "", "pk", "pv", op="MultiHeadAttention", domain=MICROSOFT), pk=CACHE, pv=CACHE),
        PAST,
    ),
    "grouped": (model(attention(op="GroupQueryAttention", domain=MICROSOFT)), "its own causal mask and cache"),
    "name of another domain": (model(attention(domain=MICROSOFT)), "the input order of domain 'com.microsoft'"),
    "TensorRT's own": (model(attention(op="TRT_Attention", is_causal=1), keys="target_len"), UNEQUAL),
}
RIGHT = {
    "plain": model(attention()),
    "mask": model(attention("m"), m=["batch", 1, "target_len", "source_len"]),
    "causal over itself": model(CAUSAL, keys="target_len"),
    "one output of another domain": model(attention(op="MultiHeadAttention", domain=MICROSOFT, num_heads=8)),
    "causal off": model(attention(is_causal=0)),
}


@pytest.mark.parametrize("name", BAD)
def test_attention_that_would_be_wrong_is_named(name: str) -> None:
    graph, reason = BAD[name]
    (problem,) = attention_problems(graph.SerializeToString())
    operator = graph.graph.node[0].op_type
    assert problem.startswith(f"{operator} 'a' has ")
    assert reason in problem
    assert problem.endswith("which TensorRT ignores or misreads; give it a mask [batch, 1, target_len, len] instead")


@pytest.mark.parametrize("name", RIGHT)
def test_correct_attention_passes(name: str) -> None:
    assert attention_problems(RIGHT[name].SerializeToString()) == []


def test_one_row_of_mask_is_right_for_one_query() -> None:
    step = model(attention("m"), m=["batch", 1, 1, "source_len"])
    step.graph.input[0].type.tensor_type.shape.dim[2].dim_value = 1
    assert attention_problems(step.SerializeToString()) == []


def test_everything_wrong_with_a_node_is_one_problem() -> None:
    graph = model(attention("", "pk", "pv", "n", is_causal=1), pk=CACHE, pv=CACHE, n=["batch"])
    (problem,) = attention_problems(graph.SerializeToString())
    assert f"has {UNEQUAL} and {PAST} and nonpad_kv_seqlen, which" in problem


def nested(node: onnx.NodeProto, depth: int) -> onnx.NodeProto:
    for _ in range(depth):
        branch = helper.make_graph([node], "branch", [], [value("y", None)])
        node = helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)
    return node


@pytest.mark.parametrize("depth", [1, 3])
def test_subgraphs_are_searched(depth: int) -> None:
    graph = model(nested(CAUSAL, depth), c=[], keys="target_len")
    problems = attention_problems(graph.SerializeToString())
    assert len(problems) == 2**depth
    assert all(UNEQUAL in problem for problem in problems), "shapes of the outer graph say nothing of an inner name"


def test_functions_are_searched_and_their_names_are_their_own() -> None:
    opsets = [helper.make_opsetid("", 24)]
    inner = attention()
    reference = onnx.AttributeProto(name="is_causal", ref_attr_name="causal", type=onnx.AttributeProto.INT)
    inner.attribute.append(reference)
    body = helper.make_function("own", "Attention", ["q", "k", "v"], ["y"], [inner], opsets, ["causal"])
    (problem,) = attention_problems(model(attention(domain="own"), functions=[body]).SerializeToString())
    assert UNEQUAL in problem, "a caller may switch it on"
    plain = helper.make_function("own", "Attention", ["q", "k", "v"], ["y"], [attention()], opsets, [])
    assert attention_problems(model(attention(domain="own"), functions=[plain]).SerializeToString()) == []
    deep = helper.make_function("own", "F", ["q", "k", "v", "c"], ["y"], [nested(CAUSAL, 1)], opsets, [])
    assert len(attention_problems(model(functions=[deep]).SerializeToString())) == 2


def test_bytes_without_a_model_are_refused() -> None:
    with pytest.raises(GraphError, match=r"^graph: is not an ONNX model; export it again$"):
        attention_problems(b"\xff\xff\xff")


def test_exported_graphs_pass(dates_bundle: Path) -> None:
    for name in ("encoder", "decoder", "decoder_static"):
        graph = (dates_bundle / f"{name}.onnx").read_bytes()
        assert attention_problems(graph) == []
    assert b"Attention" in graph


def test_the_parser_accepts_the_wrong_attention_without_a_warning() -> None:
    """The reason for all this: TensorRT-RTX takes these graphs, and what they ask for is gone."""
    trt = pytest.importorskip("tensorrt_rtx")
    log = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(log)

    def parsed(graph: onnx.ModelProto) -> Any:
        network = builder.create_network(0)
        parser = trt.OnnxParser(network, log)
        assert parser.parse(graph.SerializeToString())
        layers = [network.get_layer(i) for i in range(network.num_layers)]
        (layer,) = (layer for layer in layers if layer.type == trt.LayerType.ATTENTION_INPUT)
        layer.__class__ = trt.IAttentionInputLayer
        return layer.attention.causal_kind, layer.attention.key_value_lengths

    assert parsed(BAD["is_causal"][0]) == (trt.CausalMaskKind.UPPER_LEFT, None)
    assert parsed(BAD["TensorRT's own"][0]) == (trt.CausalMaskKind.NONE, None)
    lengths = model(attention("", "", "", "n"), n=["batch"])
    lengths.graph.input[3].type.tensor_type.elem_type = TensorProto.INT64
    assert parsed(lengths) == (trt.CausalMaskKind.NONE, None)
