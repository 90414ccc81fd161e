"""Find attention that TensorRT would take without a word and compute wrongly, whoever made the graph.

Its parser drops `nonpad_kv_seqlen`, reads `is_causal` as "query i sees keys 0 to i" whatever the cache holds, and
looks operators up by name alone, so that one of another domain passes for ONNX's own. What it refuses by itself is
named here too: past and present have their remedy in the graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import onnx

from tfexport.errors import GraphError, shortened

_STANDARD = ("", "ai.onnx")
# Inputs of ONNX Attention (https://onnx.ai/onnx/operators/onnx__Attention.html) and of com.microsoft
# MultiHeadAttention (https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md).
_PAST = {"Attention": slice(4, 6), "MultiHeadAttention": slice(6, 10)}
_NONPAD = slice(6, 7)
_MASK = {"Attention": 3, "MultiHeadAttention": 5}
_CAUSAL = ("is_causal", "unidirectional")

Shape = list[str | int]


def attention_problems(model: onnx.ModelProto | bytes) -> list[str]:
    """Say which attention nodes TensorRT would compute wrongly, in the graph, its subgraphs and functions.

    Args:
        model: a model or its bytes; its external data is not read.

    Returns:
        One problem a node, each with the remedy; empty when there is none.

    Raises:
        GraphError: the bytes are no ONNX model.
    """
    if isinstance(model, bytes):
        model = _parse(model)
    own = {(function.domain, function.name) for function in model.functions}
    problems = []
    shapes: Mapping[str, Shape] | None = None
    for node, is_top in _nodes(model):
        if "Attention" not in node.op_type or (node.domain, node.op_type) in own:
            continue
        if is_top and shapes is None:
            shapes = _shapes(model)
        reasons = list(_reasons(node, shapes or {} if is_top else {}))
        if reasons:
            problems.append(
                f"{node.op_type} {shortened(node.name)} has {' and '.join(reasons)}, "
                "which TensorRT drops or misreads; give it a mask [batch, 1, target_len, len] instead"
            )
    return problems


def _parse(raw: bytes) -> onnx.ModelProto:
    try:
        return onnx.load_from_string(raw)
    except Exception as error:
        raise GraphError("graph: is not an ONNX model; export it again") from error


def _nodes(model: onnx.ModelProto) -> Iterator[tuple[onnx.NodeProto, bool]]:
    """List all nodes, and whether each lies at the top, where shape inference names its tensors."""
    yield from ((node, True) for node in model.graph.node)
    for body in (model.graph, *model.functions):
        yield from ((node, False) for node in _inner(body.node))
    for function in model.functions:
        yield from ((node, False) for node in function.node)


def _inner(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    for node in nodes:
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                yield from graph.node
                yield from _inner(graph.node)


def _reasons(node: onnx.NodeProto, shapes: Mapping[str, Shape]) -> Iterator[str]:
    operator = node.op_type
    if operator == "Attention" and node.domain not in _STANDARD:
        yield f"its inputs as domain {shortened(node.domain)} lays them out"
        return
    if operator == "GroupQueryAttention":
        yield "a causal mask and a cache of its own"
        return
    causal = any(attribute.name in _CAUSAL and (attribute.i or attribute.ref_attr_name) for attribute in node.attribute)
    if causal and (operator == "TRT_Attention" or not _equal_lengths(node, shapes)):
        yield "is_causal where queries and keys may differ in number"
    if operator in _PAST and (any(node.input[_PAST[operator]]) or any(node.output[1:])):
        yield "past and present"
    if operator == "Attention" and any(node.input[_NONPAD]):
        yield "nonpad_kv_seqlen"
    if operator in _MASK and _is_row_mask(node, shapes):
        yield "one row of mask for several queries"


def _equal_lengths(node: onnx.NodeProto, shapes: Mapping[str, Shape]) -> bool:
    query, key = (_length(shapes.get(name)) for name in node.input[:2])
    return query is not None and query == key


def _is_row_mask(node: onnx.NodeProto, shapes: Mapping[str, Shape]) -> bool:
    place = _MASK[node.op_type]
    mask = shapes.get(node.input[place], []) if len(node.input) > place else []
    return len(mask) >= 2 and mask[-2] == 1 and _length(shapes.get(node.input[0])) != 1


def _length(shape: Shape | None) -> str | int | None:
    """Return the sequence length of [batch, heads, len, width] or [batch, len, width]; None when it is not known."""
    return (shape[-2] or None) if shape and len(shape) in (3, 4) else None


def _shapes(model: onnx.ModelProto) -> Mapping[str, Shape]:
    """Return what shape inference knows of each tensor; an unknown dimension is 0."""
    try:
        graph = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    except (onnx.shape_inference.InferenceError, RuntimeError, ValueError):  # nothing known: the strict reading
        graph = model.graph
    return {
        value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in (*graph.input, *graph.output, *graph.value_info)
    }
