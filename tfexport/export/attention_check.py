"""Find attention that TensorRT accepts silently but computes incorrectly.

TensorRT's parser ignores `nonpad_kv_seqlen`, reads `is_causal` as "query i attends to keys 0 to i" even if the cache is
not empty, and ignores the domain of an operator. Past and present, which TensorRT rejects, are reported too.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass

from tfexport.errors import GraphError, shortened

_STANDARD = ("", "ai.onnx")
# Inputs of ONNX Attention (https://onnx.ai/onnx/operators/onnx__Attention.html) and of com.microsoft
# MultiHeadAttention (https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md).
_PAST = {"Attention": slice(4, 6), "MultiHeadAttention": slice(6, 10)}
_MASK = {"Attention": 3, "MultiHeadAttention": 5}
_CAUSAL = ("is_causal", "unidirectional")


def attention_problems(model: ir.Model | bytes) -> list[str]:
    """Describe each attention node that TensorRT would compute incorrectly."""
    if isinstance(model, bytes):
        try:
            model = ir.from_proto(onnx.load_from_string(model))
        except Exception as error:
            raise GraphError("graph: is not an ONNX model; export it again") from error
    bodies: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    nodes = [node for body in bodies for node in ir.traversal.RecursiveGraphIterator(body)]
    nodes = [node for node in nodes if "Attention" in node.op_type and node.op_identifier() not in model.functions]
    if any(node.graph is model.graph for node in nodes):
        # Without inferred shapes, attention that depends on them is reported.
        ShapeInferencePass(check_type=False, strict_mode=False)(model)
    return [
        f"{node.op_type} {shortened(node.name or '')} has {reasons}, "
        "which TensorRT ignores or misreads; give it a mask [batch, 1, target_len, len] instead"
        for node in nodes
        if (reasons := " and ".join(_reasons(node, is_top=node.graph is model.graph)))
    ]


def _reasons(node: ir.Node, *, is_top: bool) -> Iterator[str]:
    operator, attributes = node.op_type, node.attributes
    if operator == "Attention" and node.domain not in _STANDARD:
        yield f"the input order of domain {shortened(node.domain)}"
        return
    if operator == "GroupQueryAttention":
        yield "its own causal mask and cache"
        return
    switches = [attributes[name] for name in _CAUSAL if name in attributes]
    is_causal = any(switch.is_ref() or switch.as_int() for switch in switches)
    query, key, mask = (_shape(node, place) if is_top else [] for place in (0, 1, _MASK.get(operator, -1)))
    if is_causal and (operator == "TRT_Attention" or _length(query) is None or _length(query) != _length(key)):
        yield "is_causal although the number of queries and keys may differ"
    if operator in _PAST and any(map(_is_set, (*node.inputs[_PAST[operator]], *node.outputs[1:]))):
        yield "past and present"
    if operator == "Attention" and any(map(_is_set, node.inputs[6:7])):
        yield "nonpad_kv_seqlen"
    if operator in _MASK and len(mask) >= 2 and mask[-2] == 1 and _length(query) != 1:
        yield "one mask row for several queries"


def _is_set(value: ir.Value | None) -> bool:
    return value is not None and value.name != ""


def _shape(node: ir.Node, place: int) -> list[int | str | None]:
    value = node.inputs[place] if 0 <= place < len(node.inputs) else None
    shape = value.shape if value is not None else None
    return [dim if isinstance(dim, int) else dim.value for dim in shape or ()]


def _length(shape: list[int | str | None]) -> int | str | None:
    # The shape is [batch, heads, len, width] or [batch, len, width].
    return shape[-2] if len(shape) in (3, 4) else None
