"""Estimate the memory that a graph needs for its activations."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import onnx_ir as ir
from onnxscript import optimizer

from tfexport.errors import GraphError, raise_all, shortened
from tfexport.export.graph_file import load_graph

# Fold only computations of shapes; constants up to this size need little memory.
_FOLDED_ITEMS = 1024
# Operators whose outputs share the memory of their inputs.
_VIEWS = ("Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten")


def activation_bytes(path: Path, sizes: Mapping[str, int]) -> int:
    """Return the peak memory of activations if a graph runs node by node.

    `Attention` counts with its scores and their softmax in float32, as if no kernel fused it. Weights, inputs and
    outputs do not count. `sizes` are those of the named dimensions of the inputs.
    """
    model = load_graph(path)
    _fix(model.graph, sizes, path.name)
    try:
        optimizer.fold_constants(
            model, onnx_shape_inference=True, input_size_limit=_FOLDED_ITEMS, output_size_limit=_FOLDED_ITEMS
        )
    except Exception as error:
        raise GraphError(f"{path.name}: has no shapes at these sizes ({error}); check the sizes") from error
    return _peak(model.graph, path.name)


def _fix(graph: ir.Graph, sizes: Mapping[str, int], subject: str) -> None:
    """Replace the dimensions of the inputs by numbers and drop all inferred shapes."""
    names = {dim.value for value in graph.inputs for dim in value.shape or () if isinstance(dim, ir.SymbolicDim)}
    problems = [f"dimension {name} has no size" for name in sorted(map(str, names - sizes.keys()))]
    raise_all(GraphError, subject, problems)
    for value in graph.inputs:
        value.shape = _sized(value.shape, sizes)
    for node in graph:
        for value in node.outputs:
            # The output of `TopK` depends on the value of an input, so it keeps its declared dimensions.
            keeps_shape = node.op_type == "TopK" and value.is_graph_output()
            value.shape = _sized(value.shape, sizes) if keeps_shape else None


def _sized(shape: ir.Shape | None, sizes: Mapping[str, int]) -> ir.Shape | None:
    sized = [dim if isinstance(dim, int) else sizes.get(str(dim.value), dim) for dim in shape or ()]
    return None if shape is None else ir.Shape(sized)


def _peak(graph: ir.Graph, subject: str) -> int:
    not_counted = {*graph.inputs, *graph.outputs, *graph.initializers.values()}
    owners: dict[ir.Value, ir.Value] = {}
    last: dict[ir.Value, int] = {}
    for index, node in enumerate(graph):
        if node.op_type in _VIEWS and node.inputs[0] is not None:
            owners[node.outputs[0]] = owners.get(node.inputs[0], node.inputs[0])
        for value in (*node.inputs, *node.outputs):
            if value is not None:
                last[owners.get(value, value)] = index
    problems: list[str] = []
    used = peak = 0
    freed: defaultdict[int, int] = defaultdict(int)
    for index, node in enumerate(graph):
        for value in node.outputs:
            if value not in owners and value not in not_counted:
                size = _bytes(value, problems)
                used += size
                freed[last[value]] += size
        peak = max(peak, used + _scratch(node))
        used -= freed[index]
    raise_all(GraphError, subject, problems)
    return peak


def _scratch(node: ir.Node) -> int:
    """Return the bytes of an attention's scores and their softmax; 0 for other nodes."""
    shapes = [value.shape for value in node.inputs[:2] if value is not None and value.shape is not None]
    if node.op_type != "Attention" or len(shapes) < 2 or not all(s.is_static() and len(s) == 4 for s in shapes):
        return 0
    query, key = (shape.numpy() for shape in shapes)
    return 2 * 4 * math.prod(query[:3]) * key[2]


def _bytes(value: ir.Value, problems: list[str]) -> int:
    if value.shape is None or value.dtype is None or not value.shape.is_static():
        problems.append(f"the size of {shortened(value.name)} depends on more than the dimensions of the inputs")
        return 0
    return math.prod(value.shape.numpy()) * value.dtype.bitwidth // 8
