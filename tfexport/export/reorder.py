"""The graph that copies rows of a cache on the device, for beam search."""

from __future__ import annotations

import onnx_ir as ir

from tfexport.contract import CONCAT_OPSETS, REORDER, TensorSpec, reorder_spec
from tfexport.precision import Precision

# The oldest version with this opset, so that every runtime of the concat variant can run this graph.
_IR_VERSION = 8


def reorder_model(precision: Precision) -> ir.Model:
    """Build the graph that computes reordered[r] = cache[order[r]]."""
    graph_spec = reorder_spec(precision)
    cache, order, reordered = map(_value, (*graph_spec.inputs, *graph_spec.outputs))
    gather = ir.Node("", "Gather", [cache, order], [ir.AttrInt64("axis", 0)], outputs=[reordered], name=REORDER)
    graph = ir.Graph([cache, order], [reordered], nodes=[gather], opset_imports={"": CONCAT_OPSETS[0]}, name=REORDER)
    return ir.Model(graph, ir_version=_IR_VERSION, producer_name="tfexport")


def reorder_graph(precision: Precision) -> bytes:
    """Serialize the graph for a cache; equal precisions give equal bytes."""
    return bytes(ir.to_proto(reorder_model(precision)).SerializeToString(deterministic=True))


def _value(tensor: TensorSpec) -> ir.Value:
    dtype = {"float32": "float"}.get(tensor.dtype, tensor.dtype)
    return ir.val(tensor.name, ir.DataType[dtype.upper()], tensor.shape)
