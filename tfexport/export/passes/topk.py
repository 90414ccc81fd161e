"""Append the selection of tokens to a decoder, so that the logits of a whole vocabulary need not leave it."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from tfexport.contract import CANDIDATE_IDS, CANDIDATE_LOGITS, LOG_NORMALIZER, LOGITS, NUM_CANDIDATES


def append_selection(model: ir.Model) -> None:
    """Add input `num_candidates` and outputs `candidate_ids`, `candidate_logits` and `log_normalizer`.

    TopK sorts, and by its definition puts the lower id first where logits are equal
    (https://onnx.ai/onnx/operators/onnx__TopK.html). ONNX Runtime keeps to that on the CPU; on CUDA it does not for
    every size, and TensorRT documents no order, so sessions there sort what they get.

    Args:
        model: a decoder whose first output is `logits` [rows, vocab]; changed in place.
    """
    graph = model.graph
    logits = graph.outputs[0]
    assert logits.name == LOGITS
    assert logits.shape is not None
    count = ir.val(NUM_CANDIDATES, ir.DataType.INT64, [1])
    top = ir.Node("", "TopK", [logits, count], [ir.AttrInt64("axis", -1), ir.AttrInt64("sorted", 1)], num_outputs=2)
    # log Σ exp = logit - log_softmax, at the best token, whose probability is at least 1/vocab. Softmax is far faster
    # in ONNX Runtime than ReduceLogSumExp.
    share = ir.Node("", "Softmax", [logits], [ir.AttrInt64("axis", -1)])
    first = ir.Value(name="best", const_value=ir.tensor(np.array([0], np.int64), name="best"))
    best_id = ir.Node("", "Gather", [top.outputs[1], first], [ir.AttrInt64("axis", 1)])
    best_logit = ir.Node("", "Gather", [top.outputs[0], first], [ir.AttrInt64("axis", 1)])
    best_share = ir.Node("", "GatherElements", [share.outputs[0], best_id.outputs[0]], [ir.AttrInt64("axis", 1)])
    logarithm = ir.Node("", "Log", [best_share.outputs[0]])
    total = ir.Node("", "Sub", [best_logit.outputs[0], logarithm.outputs[0]])
    named: list[tuple[ir.Value, str, ir.DataType, str | int]] = [
        (top.outputs[1], CANDIDATE_IDS, ir.DataType.INT64, "num_candidates"),
        (top.outputs[0], CANDIDATE_LOGITS, ir.DataType.FLOAT, "num_candidates"),
        (total.outputs[0], LOG_NORMALIZER, ir.DataType.FLOAT, 1),
    ]
    for value, name, dtype, width in named:
        value.name, value.type, value.shape = name, ir.TensorType(dtype), ir.Shape([logits.shape[0], width])
    graph.register_initializer(first)
    graph.inputs.append(count)
    graph.extend([top, share, best_id, best_logit, best_share, logarithm, total])
    graph.outputs[1:1] = [value for value, *_ in named]
