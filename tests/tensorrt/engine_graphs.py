"""Make small graphs that TensorRT builds, refuses, or accepts silently and computes incorrectly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import onnx
from onnx import TensorProto, helper

from tfexport.tensorrt.inspector import kernels_of

HEADS, WIDTH, CAPACITY = 2, 8, 6
FLOAT = {"fp32": TensorProto.FLOAT, "fp16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}
Value = onnx.ValueInfoProto


def value(name: str, shape: Sequence[int | str], dtype: int = TensorProto.FLOAT) -> Value:
    return helper.make_tensor_value_info(name, dtype, shape)


def model(nodes: Sequence[onnx.NodeProto], inputs: Sequence[Value], outputs: Sequence[Value], opset: int = 24) -> bytes:
    graph = helper.make_graph(list(nodes), "graph", list(inputs), list(outputs))
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()


def add(dtype: int = TensorProto.FLOAT, length: int | str = "length") -> bytes:
    """y = x + x over [2, length]."""
    node = helper.make_node("Add", ["x", "x"], ["y"], name="double")
    return model([node], [value("x", [2, length], dtype)], [value("y", [2, length], dtype)], 18)


def project() -> bytes:
    """y = x · w, with 8 by 8 weights of 0.5 in the graph."""
    node = helper.make_node("MatMul", ["x", "w"], ["y"], name="project")
    weights = [helper.make_tensor("w", TensorProto.FLOAT, [8, 8], [0.5] * 64)]
    graph = helper.make_graph([node], "graph", [value("x", ["batch", 8])], [value("y", ["batch", 8])], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10).SerializeToString()


def attention(
    precision: str = "fp32",
    *,
    queries: int | str = "target_len",
    keys: int | str = "len",
    mask: bool = True,
    causal: bool = False,
    operator: str = "Attention",
    domain: str = "",
    width: int = WIDTH,
    **attributes: object,
) -> bytes:
    """One attention over q, k and v, with the inputs and attributes that are wanted."""
    dtype = FLOAT[precision]

    def shape(length: int | str) -> list[int | str]:
        return ["batch", HEADS, length, width]

    inputs = [value("q", shape(queries), dtype), value("k", shape(keys), dtype), value("v", shape(keys), dtype)]
    if mask:
        inputs.append(value("mask", ["batch", 1, queries, keys], TensorProto.BOOL))
    if causal:
        attributes["is_causal"] = 1
    names = [one.name for one in inputs]
    node = helper.make_node(operator, names, ["y"], name="attend", domain=domain, **attributes)
    return model([node], inputs, [value("y", shape(queries), dtype)])


def cache_update(capacity: int | str = CAPACITY, *, precision: str = "fp32", through: str = "") -> bytes:
    """`TensorScatter` from an input to an output, or with an operator between it and the output."""
    dtype = FLOAT[precision]
    shape, new = ["rows", HEADS, capacity, WIDTH], ["rows", HEADS, "target_len", WIDTH]
    inputs = [value("past", shape, dtype), value("new", new, dtype), value("at", ["rows"], TensorProto.INT64)]
    written = "written" if through else "present"
    nodes = [helper.make_node("TensorScatter", ["past", "new", "at"], [written], name="write", axis=2)]
    if through:
        nodes.append(helper.make_node(through, ["written"], ["present"], name="between"))
    return model(nodes, inputs, [value("present", shape, dtype)])


def kernels(plan: bytes) -> Counter[str]:
    """Count the kernels that TensorRT-RTX 1.7.1 names inside a plan, which is documented nowhere."""
    return Counter(kernels_of(plan, ""))
