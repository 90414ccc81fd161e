"""Compute chosen layers of a half-precision graph in float32, and show tensors.

A layer is named after the module of its weights, such as `decoder.layers.0.feed_forward.fc1`. Operators without weights
belong to the layer before them: an activation or a residual sum to the product that it follows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from fnmatch import fnmatchcase

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

_HALF = {ir.DataType.FLOAT16, ir.DataType.BFLOAT16}
_FLOAT = _HALF | {ir.DataType.FLOAT}
# Caches are inputs and outputs in one memory, so their type is that of the contract. Shapes have no precision, and
# casts for them would be more readers of a cache.
_UNCHANGED = ("TensorScatter", "Shape", "Size")
_PARTS = ("weight", "bias", "weight_narrow", "weight_scale")
_WIDE = ".fp32"  # suffix of tensors whose half-precision copy has the original name


def layer_names(data: bytes) -> list[str]:
    """Return the layers of a serialized graph, in order."""
    return list(dict.fromkeys(filter(None, tensor_layers(data).values())))


def tensor_layers(data: bytes) -> dict[str, str]:
    """Return the layer of every float tensor that a graph computes, in order."""
    layers = [(value, layer) for node, layer in _layers(_parsed(data).graph) for value in node.outputs]
    return {value.name or "": layer for value, layer in layers if value.dtype in _FLOAT}


def keep_fp32(data: bytes, patterns: Sequence[str]) -> bytes:
    """Compute the layers that match a pattern in float32.

    Inputs and outputs keep their types. Values between two such layers stay in float32, so that they can exceed the
    range of float16.
    """
    model = _parsed(data)
    wide: dict[ir.Value, ir.Value] = {}
    for node, layer in list(_layers(model.graph)):
        if node.op_type not in _UNCHANGED and any(fnmatchcase(layer, pattern) for pattern in patterns):
            _widen(model.graph, node, wide)
    RemoveUnusedNodesPass()(model)
    return _serialized(model)


def all_fp32(data: bytes, *, rounds: bool = False) -> bytes:
    """Compute everything in float32, also inputs and outputs.

    With `rounds`, round every tensor to the type that it had, as kernels do that multiply in half precision and sum in
    float32. ONNX Runtime has few such kernels on the CPU, and leaves out the rounding between others.
    """
    model = _parsed(data)
    for value in list(model.graph.initializers.values()):
        if value.dtype in _HALF:
            cast = _cast(value, ir.DataType.FLOAT, f"{value.name}.exact")
            value.replace_all_uses_with(cast.outputs[0])
            cast.replace_input_with(0, value)
            model.graph.insert_before(model.graph[0], cast)
    for value in model.graph.inputs:
        _set_float(value)
    for node in list(model.graph):
        _set_result_type(node)
        for value in node.outputs:
            half = value.dtype
            _set_float(value)
            if rounds and half in _HALF:
                _round(model.graph, node, value, half)
    return _serialized(model)


def show_tensors(data: bytes, names: Collection[str]) -> tuple[bytes, dict[str, str]]:
    """Make tensors outputs; return also the output that has each of them.

    A tensor of a layer that `keep_fp32` computes in float32 is shown before it is rounded, and also after it.
    """
    model = _parsed(data)
    values = {value.name or "": value for node in model.graph for value in node.outputs}
    outputs = {name: wide if (wide := f"{name}{_WIDE}") in values else name for name in names}
    present = {value.name for value in model.graph.outputs}
    shown = dict.fromkeys(name for pair in outputs.items() for name in pair if name in values and name not in present)
    model.graph.outputs.extend(values[name] for name in shown)
    return _serialized(model), outputs


def _layers(graph: ir.Graph) -> Iterator[tuple[ir.Node, str]]:
    layer = ""
    for node in graph:
        named = [_module(value) for value in node.inputs if value is not None and value.is_initializer()]
        layer = next(filter(None, named), layer)
        yield node, layer


def _module(weight: ir.Value) -> str:
    """Return the module of a weight, or "" for a constant, which has no dot."""
    module, dot, part = (weight.name or "").rpartition(".")
    return module if dot and part in _PARTS else (weight.name or "") if dot else ""


def _widen(graph: ir.Graph, node: ir.Node, wide: dict[ir.Value, ir.Value]) -> None:
    for index, value in enumerate(node.inputs):
        if value is None or value.dtype not in _HALF:
            continue
        if value not in wide:
            cast = _cast(value, ir.DataType.FLOAT, f"{value.name}{_WIDE}")
            producer = value.producer()
            graph.insert_after(producer, cast) if producer else graph.insert_before(graph[0], cast)
            wide[value] = cast.outputs[0]
        node.replace_input_with(index, wide[value])
    _set_result_type(node)
    for value in node.outputs:
        half, name = value.dtype, value.name
        if half not in _HALF:
            continue
        _set_float(value)
        value.name = f"{name}{_WIDE}"
        cast = _cast(value, half, name or "")
        narrow = cast.outputs[0]
        value.replace_all_uses_with(narrow, replace_graph_outputs=True)
        cast.replace_input_with(0, value)
        graph.insert_after(node, cast)
        wide[narrow] = value


def _round(graph: ir.Graph, node: ir.Node, value: ir.Value, half: ir.DataType) -> None:
    """Insert casts to half precision and back; the result gets the name of the value."""
    name, value.name = value.name or "", f"{value.name}.exact"
    narrow = _cast(value, half, f"{name}.half")
    result = _cast(narrow.outputs[0], ir.DataType.FLOAT, name)
    result.name = f"round_{name}"
    value.replace_all_uses_with(result.outputs[0], replace_graph_outputs=True)
    narrow.replace_input_with(0, value)
    graph.insert_after(node, [narrow, result])


def _cast(value: ir.Value, dtype: ir.DataType, name: str) -> ir.Node:
    cast = ir.node("Cast", [value], {"to": dtype}, name=f"cast_{name}")
    result = cast.outputs[0]
    result.name, result.type, result.shape = name, ir.TensorType(dtype), value.shape
    return cast


def _set_result_type(node: ir.Node) -> None:
    """Change attributes that make the result half precision."""
    if node.op_type == "Cast" and node.attributes["to"].as_int() in _HALF:
        node.attributes["to"] = ir.AttrInt64("to", ir.DataType.FLOAT)
    if node.op_type == "ConstantOfShape" and (filled := node.attributes.get("value")) is not None:
        tensor = filled.as_tensor()
        if tensor.dtype in _HALF:
            node.attributes["value"] = ir.AttrTensor("value", ir.tensor(tensor.numpy().astype(np.float32)))


def _set_float(value: ir.Value) -> None:
    if value.dtype in _HALF:
        value.type = ir.TensorType(ir.DataType.FLOAT)


def _parsed(data: bytes) -> ir.Model:
    return ir.from_proto(onnx.load_model_from_string(data))


def _serialized(model: ir.Model) -> bytes:
    return bytes(ir.to_proto(model).SerializeToString(deterministic=True))
