"""Find the linear maps of graphs, the embeddings, and the weights that nothing else uses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import onnx
from onnx import helper

from tfexport.contract import LOGITS
from tfexport.export.external_data import Span, external_weights, span

# Attributes of a Gemm that changes nothing but to multiply and add.
_PLAIN = {"alpha": 1.0, "beta": 1.0, "transA": 0}


@dataclass(frozen=True)
class Product:
    """One linear map whose matrix lies in a file.

    Attributes:
        node: that multiplies.
        weight: name of the initializer.
        outputs: axis of the outputs in it, 0 or 1.
        bias: name of what is added, [outputs]; "" for nothing.
        activation: operator that the node applies to the sum; "" for none.
        is_projection: whether it gives the logits.
    """

    node: onnx.NodeProto
    weight: str
    outputs: int
    bias: str
    activation: str
    is_projection: bool


def products(graph: onnx.GraphProto, *, least: int) -> Iterator[Product]:
    """List the linear maps of a graph: MatMul, Gemm, and the FusedGemm of ONNX Runtime.

    A Gemm with factors, or with a bias that is no vector, is not among them.

    Args:
        graph: to search.
        least: how many weights a matrix has to have.
    """
    matrices = _matrices(graph, least)
    turned = {node.output[0]: node.input[0] for node in graph.node if _turns(node)}
    vectors = {weight.name for weight in graph.initializer if len(weight.dims) == 1}
    projection = _projection(graph)
    for node in graph.node:
        if node.op_type not in ("MatMul", "Gemm", "FusedGemm") or len(node.input) < 2:
            continue
        weight = turned.get(node.input[1], node.input[1])
        bias = node.input[2] if len(node.input) > 2 else ""
        factors = _attributes(node)
        is_turned = bool(factors.pop("transB", 0)) != (node.input[1] in turned)
        activation = factors.pop("activation", b"").decode()
        is_plain = all(value == _PLAIN.get(name) for name, value in factors.items())
        if weight in matrices and is_plain and (not bias or bias in vectors):
            is_projection = node.output[0] == projection
            yield Product(node, weight, 0 if is_turned else 1, bias, activation, is_projection)


def lookups(graph: onnx.GraphProto, *, least: int) -> Iterator[onnx.NodeProto]:
    """List the embeddings of a graph: each Gather that takes rows of a matrix in a file by token id.

    Args:
        graph: to search.
        least: how many weights a matrix has to have.
    """
    matrices, inputs = _matrices(graph, least), {value.name for value in graph.input}
    for node in graph.node:
        is_gather = node.op_type == "Gather" and not _attributes(node).get("axis")
        if is_gather and node.input[0] in matrices and node.input[1] in inputs:
            yield node


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


def _matrices(graph: onnx.GraphProto, least: int) -> set[str]:
    weights = external_weights(graph).items()
    return {name for name, weight in weights if len(weight.dims) == 2 and weight.dims[0] * weight.dims[1] >= least}


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}


def _turns(node: onnx.NodeProto) -> bool:
    """Say whether a node turns a matrix: how the exporter writes a linear map, see `tfexport.export.weights`."""
    return node.op_type == "Transpose" and _attributes(node).get("perm") == [1, 0]


def _outputs_axis(node: onnx.NodeProto, place: int, readers: Mapping[str, list[onnx.NodeProto]]) -> int | None:
    if node.op_type == "Gemm" and place == 1:
        return 0 if _attributes(node).get("transB") else 1
    if node.op_type == "MatMul" and place == 1:
        return 1
    if _turns(node):
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
