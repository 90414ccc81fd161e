"""Say what is in one ONNX file, whoever wrote it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx

from tfexport.errors import GraphError


def describe_graph(path: Path) -> dict[str, Any]:
    """Read inputs, outputs, operators and weight files of a graph; the weights themselves stay on disk.

    Args:
        path: an ONNX file.

    Returns:
        JSON values: `opsets` by domain, `ir_version`, `operators` with their number, most frequent first,
        `weight_files`, and `inputs` and `outputs` as objects with `name`, `dtype` and `shape`.

    Raises:
        GraphError: the file cannot be read or is no ONNX model.
    """
    try:
        model = onnx.load(str(path), load_external_data=False)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise GraphError(f"{path}: is not an ONNX model ({reason}); export it again") from error
    if not model.opset_import:
        raise GraphError(f"{path}: is not an ONNX model (it names no opset); export it again")
    # Up to IR version 3 weights count among the inputs.
    weights = {initializer.name for initializer in model.graph.initializer}
    operators = Counter(
        f"{node.domain}.{node.op_type}" if node.domain else node.op_type for node in _nodes(model.graph)
    )
    return {
        "ir_version": model.ir_version,
        "opsets": {entry.domain or "ai.onnx": entry.version for entry in model.opset_import},
        "operators": dict(sorted(operators.items(), key=lambda item: (-item[1], item[0]))),
        "weight_files": sorted(
            {
                entry.value
                for initializer in model.graph.initializer
                for entry in initializer.external_data
                if entry.key == "location"
            }
        ),
        "inputs": [_tensor(value) for value in model.graph.input if value.name not in weights],
        "outputs": [_tensor(value) for value in model.graph.output],
    }


def weight_bytes(graph: bytes) -> int:
    """Add up the weights of a graph, inside it and beside it; those that share their bytes count once.

    Args:
        graph: a serialised ONNX model whose weight files need not be there.
    """
    model = onnx.load_model_from_string(graph)
    outside: dict[tuple[str, str], int] = {}
    inside = 0
    for tensor in model.graph.initializer:
        facts = {entry.key: entry.value for entry in tensor.external_data}
        if facts:
            outside[facts["location"], facts.get("offset", "0")] = int(facts["length"])
        else:
            inside += tensor.ByteSize()
    return sum(outside.values()) + inside


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Walk over the operators of a graph and of those inside of them."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from _nodes(inner)


def _tensor(value: onnx.ValueInfoProto) -> dict[str, Any]:
    tensor = value.type.tensor_type
    dtype = onnx.TensorProto.DataType.Name(tensor.elem_type).lower()
    return {
        "name": value.name,
        "dtype": {"float": "float32", "double": "float64"}.get(dtype, dtype),
        "shape": [dim.dim_param or (dim.dim_value if dim.HasField("dim_value") else "?") for dim in tensor.shape.dim],
    }
