"""Let a decoder give the logits of several of its last positions, so that one step verifies several tokens."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from tfexport.contract import KEPT, LOGITS, LOGITS_TO_KEEP
from tfexport.errors import GraphError

# As far as an axis goes.
_END = np.iinfo(np.int64).max


def keep_logits(model: ir.Model) -> None:
    """Add input `logits_to_keep`, the number of last positions of each row that `logits` has.

    Args:
        model: a traced decoder whose first output is `logits` [rows, vocab], of the last of [rows, target_len]
            positions; changed in place, it is [rows · logits_to_keep, vocab] then.

    Raises:
        GraphError: the logits are not those of a last position that is taken from all in one place.
    """
    graph = model.graph
    found = [node for node in _ancestors(graph.outputs[0]) if _takes_last(node)]
    if len(found) != 1:
        raise GraphError(
            f"speculation: the last position is taken in {len(found)} places of the decoder, expected one; take it "
            "with hidden[:, -1] before the projection to the vocabulary, or export without speculation"
        )
    (last,) = found
    count = ir.val(LOGITS_TO_KEEP, ir.DataType.INT64, [1])
    begin = ir.Node("", "Neg", [count])
    end, axis = _constant(graph, "end", _END), _constant(graph, "axis", 1)
    kept = ir.Node("", "Slice", [last.inputs[0], begin.outputs[0], end, axis])
    rows = ir.Node("", "Flatten", [kept.outputs[0]], [ir.AttrInt64("axis", 2)])
    rows.outputs[0].type = last.outputs[0].type
    graph.insert_before(last, [begin, kept, rows])
    last.outputs[0].replace_all_uses_with(rows.outputs[0])
    graph.remove(last, safe=True)
    graph.inputs.append(count)
    logits = graph.outputs[0]
    assert logits.name == LOGITS
    assert logits.shape is not None
    logits.shape = ir.Shape([KEPT, logits.shape[1]])


def _ancestors(value: ir.Value) -> list[ir.Node]:
    """Return every node that a value comes of."""
    found: dict[ir.Node, None] = {}
    waiting = [value]
    while waiting:
        node = waiting.pop().producer()
        if node is not None and node not in found:
            found[node] = None
            waiting += [source for source in node.inputs if source is not None]
    return list(found)


def _takes_last(node: ir.Node) -> bool:
    """Say whether a node takes the last of the positions, the second axis."""
    if node.op_type != "Gather" or node.attributes.get_int("axis", 0) != 1:
        return False
    index = node.inputs[1].const_value if node.inputs[1] else None
    return index is not None and index.size == 1 and int(index.numpy()) == -1


def _constant(graph: ir.Graph, name: str, number: int) -> ir.Value:
    name = f"{LOGITS_TO_KEEP}.{name}"
    value = ir.Value(name=name, const_value=ir.tensor(np.array([number], np.int64), name=name))
    graph.register_initializer(value)
    return value
