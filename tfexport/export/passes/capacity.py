"""Fix the capacity of the static form: TensorRT updates a cache in place only when its length is a number."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import onnx

from tfexport.config import MAX_SIZE
from tfexport.contract import CACHE_LENGTHS
from tfexport.errors import GraphError

_CAPACITY = "capacity"
# What lies between `cache_lengths` and the row of the position table that a token reads.
_SAME_POSITION = ("Add", "Cast", "Identity", "Reshape", "Unsqueeze")


def fix_capacity(path: Path, capacity: int) -> bytes:
    """Put a number for the dimension `capacity` of `decoder_static.onnx`.

    Args:
        path: of the graph.
        capacity: tokens that every cache buffer holds, 1 to the rows of the position table, where there is one.

    Returns:
        A serialised ONNX model. Its weights stay where they are: parse it with `path`, so that they are found
        beside the original.

    Raises:
        GraphError: no graph of the static form, or positions beyond its table.
    """
    try:
        model = onnx.load(str(path), load_external_data=False)
    except Exception as error:
        raise GraphError(f"{path.name}: is not an ONNX model; export the bundle again") from error
    dims = [dim for dim in _dims(model.graph) if dim.dim_param == _CAPACITY]
    if not dims:
        raise GraphError(f"{path.name}: has no dimension {_CAPACITY!r}; give a graph of the static form")
    most = min(_position_rows(model.graph), default=MAX_SIZE)
    if not 1 <= capacity <= most:
        raise GraphError(
            f"{path.name}: capacity is {capacity}, expected 1 to {most}, the positions that the model has; "
            "change --max-target-length"
        )
    for dim in dims:
        dim.dim_value = capacity
    raw: bytes = model.SerializeToString(deterministic=True)
    return raw


def _dims(graph: onnx.GraphProto) -> Iterator[onnx.TensorShapeProto.Dimension]:
    for value in (*graph.input, *graph.output, *graph.value_info):
        yield from value.type.tensor_type.shape.dim


def _position_rows(graph: onnx.GraphProto) -> Iterator[int]:
    """Say how long the tables are that are read at `cache_lengths` plus something."""
    weights = {weight.name: weight for weight in graph.initializer}
    positions = {CACHE_LENGTHS}
    for node in graph.node:
        if node.op_type in _SAME_POSITION and positions.intersection(node.input):
            positions.update(node.output)
        if node.op_type == "Gather" and node.input[0] in weights and node.input[1] in positions:
            yield weights[node.input[0]].dims[0]
