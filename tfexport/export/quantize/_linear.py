"""Find the linear maps of a graph and the matrices that only they read."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import onnx_ir as ir

from tfexport.contract import LOGITS
from tfexport.export.graph_file import Span, external_weights, span

# Smaller matrices are not worth a kernel.
LEAST_WEIGHTS = 4096


@dataclass(frozen=True)
class LinearMap:
    """A MatMul or Gemm with a matrix from the weight file."""

    node: ir.Node
    weight: ir.Value  # [outputs, inputs] or [inputs, outputs]
    outputs: int  # axis of the outputs in `weight`, 0 or 1
    bias: ir.Value | None
    is_projection: bool  # computes the logits

    @property
    def is_plain(self) -> bool:
        """Whether the node only multiplies and adds a vector (no scaling or transposing)."""
        get = self.node.attributes
        is_scaled = get.get_float("alpha", 1.0) != 1 or get.get_float("beta", 1.0) != 1
        is_vector = self.bias is None or (self.bias.const_value is not None and len(self.bias.const_value.shape) == 1)
        return is_vector and not is_scaled and not get.get_int("transA", 0)


def linear_maps(graph: ir.Graph) -> Iterator[LinearMap]:
    """Yield the linear maps with at least 4096 weights, in the order of the graph."""
    projection = _projection(graph)
    for node in graph:
        operand = node.inputs[1] if node.op_type in ("MatMul", "Gemm") else None
        producer = operand.producer() if operand else None
        transpose = producer if producer and _is_transpose(producer) else None
        weight = transpose.inputs[0] if transpose else operand
        if weight and _is_large_matrix(weight):
            axis = 0 if bool(node.attributes.get_int("transB", 0)) != (transpose is not None) else 1
            bias = node.inputs[2] if len(node.inputs) > 2 else None
            yield LinearMap(node, weight, axis, bias, node is projection)


def only_linear(graphs: Iterable[ir.Graph]) -> dict[Span, int]:
    """Find the matrices that only linear maps read; return their output axes."""
    axes: dict[Span, set[int | None]] = defaultdict(set)
    for graph in graphs:
        maps: Counter[ir.Value] = Counter()
        for found in linear_maps(graph):
            # The output projection is excluded: it decides between close logits, and is often also the embedding.
            axes[span(found.weight)].add(None if found.is_projection else found.outputs)
            maps[found.weight] += 1
        for weight in external_weights(graph):
            if maps[weight] != sum(1 for _ in _readers(weight)):
                axes[span(weight)].add(None)
    only = {place: found.pop() for place, found in axes.items() if len(found) == 1}
    return {place: axis for place, axis in only.items() if axis is not None}


def lookups(graph: ir.Graph) -> Iterator[ir.Node]:
    """Yield the embeddings: each Gather of rows of a large matrix by token id."""
    for node in graph:
        is_gather = node.op_type == "Gather" and not node.attributes.get_int("axis", 0)
        if is_gather and node.inputs[0] and _is_large_matrix(node.inputs[0]) and node.inputs[1] in graph.inputs:
            yield node


def _is_large_matrix(value: ir.Value) -> bool:
    tensor = value.const_value
    return isinstance(tensor, ir.ExternalTensor) and len(tensor.shape) == 2 and tensor.size >= LEAST_WEIGHTS


def _is_transpose(node: ir.Node) -> bool:
    return node.op_type == "Transpose" and node.attributes.get_ints("perm", ()) == (1, 0)


def _readers(weight: ir.Value) -> Iterator[ir.Node]:
    for node, _ in weight.uses():
        if _is_transpose(node):
            yield from (reader for reader, _ in node.outputs[0].uses())
        else:
            yield node


def _projection(graph: ir.Graph) -> ir.Node | None:
    values = {value.name: value for node in graph for value in node.outputs}
    maker = values[LOGITS].producer() if LOGITS in values else None
    while maker is not None and maker.op_type in ("Cast", "Mul"):
        maker = next((value.producer() for value in maker.inputs if value and value.producer()), None)
    return maker
