"""Find the weights of graphs that nothing but linear maps uses, and where they lie."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import onnx
from onnx import helper

from tfexport.spec import LOGITS


class Span(NamedTuple):
    """Where the bytes of a weight lie; equal spans are one weight, whatever graphs call it."""

    location: str
    offset: int
    length: int


def external_weights(graph: onnx.GraphProto) -> dict[str, onnx.TensorProto]:
    """Return the initializers whose bytes lie in a file, by name."""
    external = onnx.TensorProto.EXTERNAL
    return {weight.name: weight for weight in graph.initializer if weight.data_location == external}


def span(weight: onnx.TensorProto) -> Span:
    """Say where the bytes of an external weight lie; a number that is none is -1."""
    found = {entry.key: entry.value for entry in weight.external_data}
    offset, length = (found.get(key, default) for key, default in (("offset", "0"), ("length", "")))
    return Span(found.get("location", ""), *(int(text) if text.isdecimal() else -1 for text in (offset, length)))


def linear_maps(graphs: Iterable[onnx.GraphProto], *, least: int) -> dict[Span, int]:
    """Find the matrices that only linear maps use, in all graphs together, and the axis of their outputs.

    The output projection does not count: it decides between neighbours, and is often the embedding too.

    Args:
        graphs: that share weights.
        least: how many weights a matrix has to have.
    """
    uses: dict[Span, set[int | None]] = defaultdict(set)
    for graph in graphs:
        weights = external_weights(graph)
        for name, axis in _uses(graph):
            if name in weights:
                dims = weights[name].dims
                is_large = len(dims) == 2 and dims[0] * dims[1] >= least
                uses[span(weights[name])].add(axis if is_large else None)
    only = {place: axes.pop() for place, axes in uses.items() if len(axes) == 1}
    return {place: axis for place, axis in only.items() if axis is not None}


def _uses(graph: onnx.GraphProto) -> Iterator[tuple[str, int | None]]:
    """List every use of every tensor: the axis of the outputs where it is the matrix of a linear map, else None."""
    readers: dict[str, list[onnx.NodeProto]] = defaultdict(list)
    for node in graph.node:
        for name in node.input:
            readers[name].append(node)
    projection = _projection(graph)
    for node in graph.node:
        for place, name in enumerate(node.input):
            yield name, None if node.output[0] == projection else _outputs_axis(node, place, readers)


def _outputs_axis(node: onnx.NodeProto, place: int, readers: Mapping[str, list[onnx.NodeProto]]) -> int | None:
    attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    if node.op_type == "Gemm" and place == 1:
        return 0 if attributes.get("transB") else 1
    if node.op_type == "MatMul" and place == 1:
        return 1
    if node.op_type == "Transpose" and attributes.get("perm") == [1, 0]:
        # How the exporter writes a linear map over three axes; see `tfexport.graph.weights`.
        turned = node.output[0]
        found = [(reader.op_type, list(reader.input).index(turned)) for reader in readers[turned]]
        return 0 if set(found) == {("MatMul", 1)} else None
    return None


def _projection(graph: onnx.GraphProto) -> str | None:
    """Name the output of the linear map that gives the logits."""
    makers = {output: node for node in graph.node for output in node.output}
    maker = makers.get(LOGITS)
    while maker is not None and maker.op_type in ("Cast", "Mul"):
        maker = next((makers[name] for name in maker.input if name in makers), None)
    return None if maker is None else maker.output[0]
