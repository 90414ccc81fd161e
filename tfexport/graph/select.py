"""Append the selection of tokens to a decoder, so that the logits of a whole vocabulary need not leave it."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from tfexport.spec import CANDIDATE_IDS, CANDIDATE_LOGITS, LOG_NORMALIZER, LOGITS, NUM_CANDIDATES


def append_selection(model: ir.Model) -> None:
    """Add input `num_candidates` and outputs `candidate_ids`, `candidate_logits` and `log_normalizer`.

    TopK sorts, and puts the lower id first where logits are equal
    (https://onnx.ai/onnx/operators/onnx__TopK.html).

    Args:
        model: a decoder whose first output is `logits` [rows, vocab]; changed in place.
    """
    graph = model.graph
    logits = graph.outputs[0]
    assert logits.name == LOGITS
    count = ir.val(NUM_CANDIDATES, ir.DataType.INT64, [1])
    top = ir.Node("", "TopK", [logits, count], [ir.AttrInt64("axis", -1), ir.AttrInt64("sorted", 1)], num_outputs=2)
    axes = ir.Value(
        name="log_normalizer_axes", const_value=ir.tensor(np.array([-1], np.int64), name="log_normalizer_axes")
    )
    total = ir.Node("", "ReduceLogSumExp", [logits, axes], [ir.AttrInt64("keepdims", 1)])
    named: list[tuple[ir.Value, str, ir.DataType, str | int]] = [
        (top.outputs[1], CANDIDATE_IDS, ir.DataType.INT64, "num_candidates"),
        (top.outputs[0], CANDIDATE_LOGITS, ir.DataType.FLOAT, "num_candidates"),
        (total.outputs[0], LOG_NORMALIZER, ir.DataType.FLOAT, 1),
    ]
    for value, name, dtype, width in named:
        value.name, value.type, value.shape = name, ir.TensorType(dtype), ir.Shape(["rows", width])
    graph.register_initializer(axes)
    graph.inputs.append(count)
    graph.extend([top, total])
    graph.outputs[1:1] = [value for value, *_ in named]
