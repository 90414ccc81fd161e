"""Describe the content of any ONNX file."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from tfexport.export._graph_file import external_weights, load_graph, span, tensor_spec


def describe_graph(path: Path) -> dict[str, Any]:
    """Return inputs, outputs, operators and names of the weight files as JSON values."""
    model = load_graph(path)
    graph = model.graph
    nodes = ir.traversal.RecursiveGraphIterator(graph)
    operators = Counter(f"{node.domain}.{node.op_type}" if node.domain else node.op_type for node in nodes)
    # Up to IR version 3, the inputs include the weights.
    inputs = [value for value in graph.inputs if value.name not in graph.initializers]
    return {
        "ir_version": model.ir_version,
        "opsets": {domain or "ai.onnx": version for domain, version in model.opset_imports.items()},
        "operators": dict(sorted(operators.items(), key=lambda item: (-item[1], item[0]))),
        "weight_files": sorted({span(weight).location for weight in external_weights(graph)}),
        "inputs": [_described(value) for value in inputs],
        "outputs": [_described(value) for value in graph.outputs],
    }


def weight_bytes(graph: bytes) -> int:
    """Return the size of all weights of a serialized graph; shared bytes count once."""
    model = ir.from_proto(onnx.load_model_from_string(graph))
    outside = {span(weight) for weight in external_weights(model.graph)}
    tensors = [value.const_value for value in model.graph.initializers.values()]
    inside = [tensor.nbytes for tensor in tensors if tensor is not None and not isinstance(tensor, ir.ExternalTensor)]
    return sum(place.length for place in outside) + sum(inside)


def _described(value: ir.Value) -> dict[str, Any]:
    tensor = tensor_spec(value)
    return {"name": tensor.name, "dtype": tensor.dtype, "shape": list(tensor.shape)}
