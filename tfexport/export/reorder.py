"""The graph that copies rows of a cache on the device, for beam search."""

from __future__ import annotations

import onnx_ir as ir

from tfexport.contract import CONCAT_OPSETS, REORDER, TensorSpec, reorder_spec
from tfexport.precision import Precision

# The opset of the concat variant and its IR version, so that every runtime of that variant can run this graph.
_OPSET, _IR_VERSION = CONCAT_OPSETS[0], 8


def reorder_model(precision: Precision) -> ir.Model:
    """Build the graph that computes reordered[r] = cache[order[r]]."""
    contract = reorder_spec(precision)
    cache, order, reordered = map(_value, (*contract.inputs, *contract.outputs))
    axis = [ir.AttrInt64("axis", 0)]
    gather = ir.Node("", "Gather", [cache, order], axis, outputs=[reordered], name=REORDER)
    graph = ir.Graph([cache, order], [reordered], nodes=[gather], opset_imports={"": _OPSET}, name=REORDER)
    return ir.Model(graph, ir_version=_IR_VERSION, producer_name="tfexport")


def reorder_graph(precision: Precision) -> bytes:
    """Serialize the graph for a cache; equal precisions give equal bytes."""
    raw: bytes = ir.to_proto(reorder_model(precision)).SerializeToString(deterministic=True)
    return raw


def _value(tensor: TensorSpec) -> ir.Value:
    dtype = {"float32": "float"}.get(tensor.dtype, tensor.dtype)
    return ir.val(tensor.name, ir.DataType[dtype.upper()], tensor.shape)
