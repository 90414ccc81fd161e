"""The graph that copies rows of a cache on the device: one Gather, for beams that continue another beam."""

from __future__ import annotations

from onnx import helper

from tfexport.contract import CACHE, CONCAT_OPSETS, ORDER, REORDER, REORDERED, Precision, reorder_spec
from tfexport.export.contract import value_info

# Those of the concat form: what takes that form takes this graph. IR 8 came with opset 18.
_OPSET, _IR_VERSION = CONCAT_OPSETS[0], 8


def reorder_graph(precision: Precision) -> bytes:
    """Make the graph of `tfexport.contract.reorder_spec`: reordered[r] = cache[order[r]].

    Args:
        precision: of the cache.

    Returns:
        A serialised ONNX model without weights, equal bytes for equal precision.
    """
    contract = reorder_spec(precision)
    graph = helper.make_graph(
        [helper.make_node("Gather", [CACHE, ORDER], [REORDERED], name=REORDER, axis=0)],
        REORDER,
        [value_info(tensor) for tensor in contract.inputs],
        [value_info(tensor) for tensor in contract.outputs],
    )
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=_IR_VERSION, producer_name="tfexport"
    )
    raw: bytes = model.SerializeToString(deterministic=True)
    return raw
