"""Nodes that TensorRT refuses are named; graphs that it would silently compute incorrectly are refused."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from onnx import TensorProto, helper

from tests.tensorrt.engine_graphs import CAPACITY, HEADS, WIDTH, add, attention, cache_update, model, value
from tfexport.contract import GraphSpec, TensorSpec
from tfexport.errors import EngineError
from tfexport.export.passes import fix_capacity
from tfexport.tensorrt._library import Library
from tfexport.tensorrt.build.network import Graph, Network, _causal_problem, check_contract, parse_graph

GRAPH = Path("graph.onnx")


def parse(rtx: Library, graph: bytes, path: Path = GRAPH) -> Network:
    return parse_graph(rtx, Graph(path.stem, graph, path))


def refusal(rtx: Library, graph: bytes, path: Path = GRAPH) -> str:
    with pytest.raises(EngineError) as caught:
        parse(rtx, graph, path)
    message = str(caught.value)
    assert message.startswith(f"tensorrt-rtx {rtx.version}: {path.name}: ")
    assert "cudaError" not in message
    return message


def test_external_weights_are_found_next_to_the_path(rtx: Library, dates_bundle: Path, tmp_path: Path) -> None:
    graph = fix_capacity(dates_bundle / "decoder_static.onnx", 16)
    network = parse(rtx, graph, dates_bundle / "decoder_static.onnx")
    assert network.layers["KV_CACHE_UPDATE"] == network.layers["ATTENTION_INPUT"] == 4
    assert next(t for t in network.inputs if t.name == "num_candidates").is_shape_tensor
    assert not next(t for t in network.inputs if t.name == "cache_lengths").is_shape_tensor
    assert "Failed to import initializer" in refusal(rtx, graph, tmp_path / "decoder_static.onnx")


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (b"", "the graph is empty; export the bundle again"),
        (b"xx", "the graph has no outputs; export the bundle again"),
        (b"garbage", "Failed to parse the ONNX model"),
        (add()[:-10], "Failed to parse the ONNX model"),
    ],
)
def test_invalid_graphs_are_refused(rtx: Library, graph: bytes, message: str) -> None:
    assert message in refusal(rtx, graph)


def test_every_node_that_cannot_be_parsed_is_named_with_operator_and_reason(rtx: Library) -> None:
    nodes = [
        helper.make_node("Multinomial", ["x"], ["y"], name="draw", sample_size=1),
        helper.make_node("NoSuchThing", ["x"], ["z"], name="invented"),
    ]
    graph = model(nodes, [value("x", [2, 4])], [value("y", [2, 1], TensorProto.INT32), value("z", [2, 1])], 18)
    message = refusal(rtx, graph)
    assert "Multinomial 'draw': UNSUPPORTED_NODE" in message
    assert "NoSuchThing 'invented': " in message
    assert "Plugin not found" in message


def test_a_cache_of_free_capacity_is_refused(rtx: Library) -> None:
    message = refusal(rtx, cache_update("capacity"))
    assert "TensorScatter 'write': INVALID_NODE" in message
    assert "must have a static sequence length dimension" in message


def test_supported_graphs_are_parsed(rtx: Library) -> None:
    for precision in ("fp32", "fp16", "bf16"):
        assert parse(rtx, cache_update(precision=precision)).layers["KV_CACHE_UPDATE"] == 1
    as_many_keys_as_queries = attention(mask=False, causal=True, queries=5, keys=5)
    assert parse(rtx, as_many_keys_as_queries).layers["ATTENTION_INPUT"] == 1


def test_a_cache_read_before_its_update_is_refused(rtx: Library) -> None:
    """The library would build it and read memory that the update overwrites."""
    shape = ["rows", HEADS, CAPACITY, WIDTH]
    inputs = [
        value("past", shape),
        value("new", ["rows", HEADS, "t", WIDTH]),
        value("at", ["rows"], TensorProto.INT64),
    ]
    update = helper.make_node("TensorScatter", ["past", "new", "at"], ["present"], name="write", axis=2)
    reads = [
        helper.make_node("ReduceSum", ["past"], ["sum"], name="add_up", keepdims=0),
        helper.make_node("Neg", ["past"], ["negative"], name="negate"),
    ]
    outputs = [value("present", shape), value("sum", []), value("negative", shape)]
    message = refusal(rtx, model([update, *reads], inputs, outputs))
    assert "'add_up' reads past, which TensorScatter 'write' overwrites; let it read the result" in message
    assert "'negate' reads past" in message
    asks_for_shape = [update, helper.make_node("Shape", ["past"], ["shape"], name="measure")]
    parse(rtx, model(asks_for_shape, inputs, [value("present", shape), value("shape", [4], TensorProto.INT64)]))


@pytest.mark.parametrize(
    ("options", "messages"),
    [
        ({"mask": False, "causal": True, "queries": 1, "keys": 5}, ["is_causal"]),
        ({"operator": "TRT_Attention", "mask": False, "causal_kind": "lower_right"}, ["LOWER_RIGHT"]),
        (
            {"operator": "GroupQueryAttention", "domain": "com.microsoft", "num_heads": 2, "kv_num_heads": 2},
            ["GroupQueryAttention 'attend'", "its own causal mask and cache"],
        ),
    ],
)
def test_attention_that_would_be_computed_wrongly_is_refused(
    rtx: Library, options: dict[str, Any], messages: list[str]
) -> None:
    """Other such graphs are in tests/export/test_attention_check.py."""
    message = refusal(rtx, attention(**options))
    assert all(part in message for part in messages)
    assert message.endswith("give it a mask [batch, 1, target_len, len] instead")


def test_causal_attention_is_found_in_the_network(rtx: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    message = refusal(rtx, attention(mask=False, causal=True))
    assert "causal (UPPER_LEFT) over any number of queries and any number of keys" in message
    assert "cannot be checked without onnx; pip install 'tfexport[export]'" in message
    assert "cannot be checked without onnx" in refusal(rtx, attention())
    assert parse(rtx, add()).layers == {"ELEMENTWISE": 1}


@pytest.mark.parametrize(("is_causal", "is_refused"), [(True, True), (False, False)])
def test_tensorrt_10_knows_one_kind_of_causal_attention(is_causal: bool, is_refused: bool) -> None:
    """Its `IAttention` has `causal` alone: tests/data/tensorrt_api.json."""
    tensor = SimpleNamespace(shape=(-1, 2, -1, 8))
    attention_10 = SimpleNamespace(name="attend", causal=is_causal, get_input=lambda i: tensor)
    assert bool(_causal_problem(attention_10)) is is_refused


def test_inputs_and_outputs_are_compared_with_the_contract(rtx: Library, dates_bundle: Path) -> None:
    network = parse(rtx, add(TensorProto.FLOAT16))
    x, y = (TensorSpec(name, "float16", (2, "source_len")) for name in ("x", "y"))
    check_contract(network, GraphSpec(inputs=(x,), outputs=(y,)))
    with pytest.raises(EngineError) as caught:
        check_contract(network, GraphSpec(inputs=(replace(x, dtype="float32"),), outputs=(replace(y, name="z"),)))
    for part in ("x is float16, expected float32", "y is float16, expected nothing of this name", "z is missing"):
        assert part in str(caught.value)
