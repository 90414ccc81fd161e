"""A table that rows are looked up in and that is multiplied with as well gets a name for each.

ONNX Runtime packs what it multiplies with on the CPU into memory of its own and then lets go of the weight, unless
another operator reads it too. Of a table that is only looked up in, the pages that are read come into memory.
"""

from __future__ import annotations

import onnx_ir as ir


def separate_lookups(model: ir.Model) -> None:
    """Let every `Gather` over the rows of a weight that others read too read it under a name of its own.

    On a GPU each name would be memory of its own, so this is for graphs that run on the CPU alone.

    Args:
        model: changed in place; weights in files are separated, and both names refer to the same bytes.
    """
    graph = model.graph
    for name, weight in list(graph.initializers.items()):
        stored = weight.const_value
        lookups = [node for node, _ in weight.uses() if node.op_type == "Gather"]
        if not isinstance(stored, ir.ExternalTensor) or len(lookups) in (0, len(weight.uses())):
            continue
        rows = ir.Value(name=f"{name}.rows", type=weight.type, shape=weight.shape)
        rows.const_value = ir.ExternalTensor(
            stored.location,
            stored.offset,
            stored.length,
            stored.dtype,
            shape=ir.Shape(stored.shape.numpy()),
            name=f"{name}.rows",
            base_dir=stored.base_dir,
        )
        graph.register_initializer(rows)
        for node in lookups:
            node.replace_input_with(0, rows)
