"""A view of a view is one view: the heads of a projection need not be split in two steps."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass


def collapse_reshapes(model: ir.Model) -> None:
    """Let every `Reshape` read what the `Reshape` before it read, and remove what nothing reads any more.

    Args:
        model: changed in place; a shape that copies a size of its input, by a 0, keeps its input. The zeros of all
            others are sizes.
    """
    for node in model.graph:
        if node.op_type == "Reshape" and not _copies(node.inputs[1]):
            node.attributes["allowzero"] = ir.AttrInt64("allowzero", 1)
        source = node.inputs[0].producer() if node.op_type == "Reshape" and node.inputs[0] else None
        if source and source.op_type == "Reshape" and not _copies(node.inputs[1]):
            node.replace_input_with(0, source.inputs[0])
    RemoveUnusedNodesPass()(model)


def _copies(shape: ir.Value | None) -> bool:
    """Say whether a shape has a 0; one that is computed from the sizes of inputs has none."""
    return bool(shape and shape.const_value and 0 in shape.const_value.numpy())
