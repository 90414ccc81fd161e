"""Passes over graphs: simplify, append the token selection, prepare for a runtime.

Every pass changes an `ir.Model` in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import InPlacePass, PassManager, PassResult, Sequential
from onnx_ir.passes import common as standard
from onnxscript.optimizer import fold_constants
from onnxscript.rewriter import RewriteRuleSet
from onnxscript.rewriter.rules import common as rules

from tfexport import contract
from tfexport.config import MAX_SIZE
from tfexport.errors import GraphError
from tfexport.export.graph_file import load_graph

_CAPACITY = "capacity"
# Vocabularies from this size on are searched in blocks of about this size.
_LEAST_IN_BLOCKS, _BLOCK = 4096, 128
# The bias of products with at least this many outputs is faster to add in an operator of its own.
_LEAST_APART = 12_000
# Operators between `cache_lengths` and the index of the position table.
_SAME_POSITION = ("Add", "Cast", "Identity", "Reshape", "Unsqueeze")

# Rules of onnxscript that apply to transformers, by the operator that they start from. Trying only these is much faster
# than trying every rule at every node, and gives the same graphs.
_RULES: dict[str, Sequence[Any]] = {
    "Mul": rules.mul_by_1_rule.commute(),
    "Add": rules.add_0_rule.commute(),
    "Sub": [rules.sub_0_rule],
    "Div": [rules.div_by_1_rule],
    "Slice": [rules.collapse_slice_rule, rules.collapse_slice2_rule],
    "Cast": [rules.cast_cast_rule, rules.no_op_cast_rule],
    "Expand": [rules.no_op_expand_rule],
    "Flatten": [rules.flatten_to_reshape_rule],
    "Reshape": [
        rules.two_reshapes_matmul_reshape_rule,
        rules.one_reshape_matmul_reshape_rule,
        rules.materialize_reshape_shape_rule,
        rules.reshape_reshape_rule,
        rules.squeeze_reshape_1d_rule,
    ],
    "Transpose": [rules.no_op_transpose_rule, rules.transpose_transpose_rule],
    "Unsqueeze": [rules.unsqueeze_unsqueeze_rule],
    "Relu": [rules.successive_relu_rule],
}


class _AtOperator:
    """Try a rewrite rule only at nodes of one operator."""

    def __init__(self, rule: Any, operator: str) -> None:
        self._rule, self._operator = rule, operator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rule, name)

    def try_rewrite(self, model: ir.Model, graph: Any, node: ir.Node, **options: Any) -> Any:
        return self._rule.try_rewrite(model, graph, node, **options) if node.op_type == self._operator else None


class _Rewrite(InPlacePass):
    _rules = RewriteRuleSet([cast(Any, _AtOperator(rule, name)) for name, some in _RULES.items() for rule in some])

    def call(self, model: ir.Model) -> PassResult:
        folded = fold_constants(model, onnx_shape_inference=True)
        return PassResult(model, modified=bool(self._rules.apply_to_model(model) or folded.modified))


def simplify(model: ir.Model) -> None:
    """Optimize like `onnxscript.optimizer.optimize`, but with fewer rules."""
    unused: list[Any] = [standard.RemoveUnusedFunctionsPass(), standard.RemoveUnusedOpsetsPass()]  # type: ignore[no-untyped-call]
    Sequential(
        standard.InlinePass(),
        PassManager([_Rewrite(), standard.RemoveUnusedNodesPass(), *unused], steps=2),
        standard.RemoveUnusedNodesPass(),
        standard.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        standard.LiftSubgraphInitializersToMainGraphPass(),
        standard.DeduplicateInitializersPass(),
        standard.CommonSubexpressionEliminationPass(),
        standard.OutputFixPass(),
        standard.NameFixPass(),
    )(model)


def collapse_reshapes(model: ir.Model) -> None:
    """Make every Reshape read the input of the Reshape before it."""
    for node in model.graph:
        shape = node.inputs[1] if node.op_type == "Reshape" else None
        if not shape or (shape.const_value and 0 in shape.const_value.numpy()):  # a 0 copies a size of the input
            continue
        node.attributes["allowzero"] = ir.AttrInt64("allowzero", 1)
        source = node.inputs[0].producer() if node.inputs[0] else None
        if source and source.op_type == "Reshape":
            node.replace_input_with(0, source.inputs[0])
    standard.RemoveUnusedNodesPass()(model)


def join_products(model: ir.Model) -> None:
    """Replace concatenated products of one input by one product.

    Gemm(x, Wᵢ, bᵢ), each viewed as [tokens, heads, width], concatenated along the heads and viewed otherwise, becomes
    Gemm(x, W, b). Its weights are named after the module of the first product: a.q.weight becomes a.weight.
    """
    for concat in [node for node in model.graph if node.op_type == "Concat"]:
        products = [product for value in concat.inputs if (product := _viewed_product(value))]
        if len(products) == len(concat.inputs) and _are_joinable(concat, products):
            _join(model.graph, concat, products)
    standard.RemoveUnusedNodesPass()(model)


def _viewed_product(value: ir.Value | None) -> ir.Node | None:
    view = value.producer() if value else None
    source = view.inputs[0] if view and view.op_type == "Reshape" else None
    product = source.producer() if source else None
    return product if product and product.op_type == "Gemm" else None


def _are_joinable(concat: ir.Node, products: Sequence[ir.Node]) -> bool:
    """Return whether only views read the result, and products differ only in weights."""
    first = products[0]
    return (
        concat.attributes.get_int("axis") == 1
        and all(use.node.op_type == "Reshape" for use in concat.outputs[0].uses())
        and all(node.inputs[0] is first.inputs[0] and node.attributes == first.attributes for node in products)
        and len({len(node.inputs) for node in products}) == 1
        and all(value and value.const_value for node in products for value in node.inputs[1:])
    )


def _join(graph: ir.Graph, concat: ir.Node, products: Sequence[ir.Node]) -> None:
    first = products[0]
    operands = list(zip(*(node.inputs[1:] for node in products), strict=True))
    # Named after the weight, because equal biases of several layers were merged under the name of the first.
    module = (operands[0][0].name or "").rsplit(".", 2)[0]
    joint = [first.inputs[0]]
    for values in operands:
        array = np.concatenate([value.const_value.numpy() for value in values if value and value.const_value])
        joint.append(_constant(graph, f"{module}.{(values[0].name or '').rpartition('.')[2]}", array))
    product = ir.Node("", "Gemm", joint, list(first.attributes.values()), num_outputs=1)
    product.outputs[0].type = first.outputs[0].type
    graph.insert_before(concat, product)
    concat.outputs[0].replace_all_uses_with(product.outputs[0])


def append_selection(model: ir.Model, *, by_blocks: bool = False) -> None:
    """Append the selection of the best tokens to a decoder.

    If logits are equal, TopK returns the lower id first (https://onnx.ai/onnx/operators/onnx__TopK.html). ONNX Runtime
    complies on the CPU, but on CUDA not for every size, and TensorRT documents no order. Sessions on these sort.
    `by_blocks` reads a large vocabulary in blocks, which ONNX Runtime does faster on the CPU.
    """
    graph = model.graph
    logits = graph.outputs[0]
    assert logits.shape is not None
    count = ir.val(contract.NUM_CANDIDATES, ir.DataType.INT64, [1])
    tape = ir.tape.Tape()
    vocab = logits.shape[1]
    if by_blocks and isinstance(vocab, int) and vocab >= _LEAST_IN_BLOCKS:
        best, ids = best_of_blocks(graph, tape, logits, count, vocab)
    else:
        best, ids = top_k(tape, logits, count)
    # log Σ exp = logit - log_softmax at the best token, whose probability is at least 1/vocab. Softmax is much faster
    # in ONNX Runtime than ReduceLogSumExp.
    probabilities = tape.op("Softmax", [logits], {"axis": -1})
    first = _constant(graph, "best", np.array([0], np.int64))
    best_id = tape.op("Gather", [ids, first], {"axis": 1})
    best_logit = tape.op("Gather", [best, first], {"axis": 1})
    best_probability = tape.op("GatherElements", [probabilities, best_id], {"axis": 1})
    total = tape.op("Sub", [best_logit, tape.op("Log", [best_probability])])
    for shortlist in graph.inputs:
        if shortlist.name == contract.SHORTLIST_IDS:
            ids = tape.op("Gather", [shortlist, ids])
    named: list[tuple[ir.Value, str, ir.DataType, str | int]] = [
        (ids, contract.CANDIDATE_IDS, ir.DataType.INT64, "num_candidates"),
        (best, contract.CANDIDATE_LOGITS, ir.DataType.FLOAT, "num_candidates"),
        (total, contract.LOG_NORMALIZER, ir.DataType.FLOAT, 1),
    ]
    for value, name, dtype, width in named:
        value.name, value.type, value.shape = name, ir.TensorType(dtype), ir.Shape([logits.shape[0], width])
    graph.inputs.append(count)
    graph.extend(tape.nodes)
    graph.outputs[1:1] = [value for value, *_ in named]


def top_k(tape: ir.tape.Tape, values: ir.Value, count: ir.Value, *, largest: int = 1) -> Sequence[ir.Value]:
    """Return the largest or smallest values of each row, in order, and their places."""
    return tape.op_multi_out("TopK", [values, count], {"axis": -1, "largest": largest, "sorted": 1}, num_outputs=2)


def best_of_blocks(
    graph: ir.Graph,
    tape: ir.tape.Tape,
    logits: ir.Value,
    count: ir.Value,
    vocab: int,
    *,
    name: str = "blocks",
    block: int = _BLOCK,
) -> tuple[ir.Value, ir.Value]:
    """Return the `count` best logits and their ids, as TopK does.

    Names of constants begin with `name`.

    They are in the `count` blocks with the largest maxima, because each of these has a value that is no less than any
    of the other blocks, or equal with a lower id. ONNX Runtime finds maxima with vector instructions, TopK without.
    """
    sizes = [size for size in range(block // 2, 2 * block + 1) if vocab % size == 0]
    size = min(sizes, key=lambda size: abs(size - block), default=block)
    if vocab % size:
        missing = _constant(graph, f"{name}.padding", np.array([0, 0, 0, -vocab % size], np.int64))
        logits = tape.op("Pad", [logits, missing, _constant(graph, f"{name}.least", np.array(-np.inf, np.float32))])
    num_blocks = -(-vocab // size)
    last, width = (_constant(graph, f"{name}.{n}", np.array(v, np.int64)) for n, v in (("axis", [-1]), ("size", size)))
    shape = _constant(graph, f"{name}.shape", np.array([0, num_blocks, size], np.int64))
    flat = _constant(graph, f"{name}.flat", np.array([0, -1], np.int64))
    blocks = tape.op("Reshape", [logits, shape])
    maxima = tape.op("ReduceMax", [blocks, last], {"keepdims": 0})
    most = tape.op("Min", [count, _constant(graph, f"{name}.count", np.array([num_blocks], np.int64))])
    _, found = top_k(tape, maxima, most)
    # In the order of their ids, so that TopK sees equal values in that order too.
    chosen, _ = top_k(tape, found, most, largest=0)
    values = tape.op("GatherND", [blocks, tape.op("Unsqueeze", [chosen, last])], {"batch_dims": 1})
    best, places = top_k(tape, tape.op("Reshape", [values, flat]), count)
    number = tape.op("Div", [places, width])
    inside = tape.op("Sub", [places, tape.op("Mul", [number, width])])
    first = tape.op("Mul", [tape.op("GatherElements", [chosen, number], {"axis": 1}), width])
    return best, tape.op("Add", [first, inside])


def separate_bias(model: ir.Model) -> None:
    """Add the bias of a product with a large vocabulary in an operator of its own.

    ONNX Runtime's Gemm fills its output with the bias on one thread, and then reads it again to add the product.
    """
    for node in list(model.graph.all_nodes()):
        weight, bias = node.inputs[1:3] if node.op_type == "Gemm" and len(node.inputs) == 3 else (None, None)
        is_stored = weight is not None and isinstance(weight.const_value, ir.ExternalTensor)
        if not is_stored or bias is None or bias.const_value is None or bias.const_value.size < _LEAST_APART:
            continue
        tape = ir.tape.Tape()
        product = tape.op(
            "Gemm", node.inputs[:2], node.attributes, output=ir.Value(name=f"{node.outputs[0].name}_product")
        )
        logits = tape.op("Add", [product, bias])
        assert node.graph is not None
        ir.convenience.replace_nodes_and_values(node.graph, node, [node], tape.nodes, node.outputs, [logits])


def keep_logits(model: ir.Model) -> None:
    """Add the input `logits_to_keep`, the number of positions with logits."""
    graph = model.graph
    found = [node for node in _ancestors(graph.outputs[0]) if _takes_last_position(node)]
    if len(found) != 1:
        raise GraphError(
            f"speculation: the decoder selects the last position in {len(found)} places, expected one; select it with "
            "hidden[:, -1] before the projection to the vocabulary, or export without speculation"
        )
    (last,) = found
    count = ir.val(contract.LOGITS_TO_KEEP, ir.DataType.INT64, [1])
    tape = ir.tape.Tape()
    end = _constant(graph, f"{contract.LOGITS_TO_KEEP}.end", np.array([np.iinfo(np.int64).max]))
    axis = _constant(graph, f"{contract.LOGITS_TO_KEEP}.axis", np.array([1], np.int64))
    positions = tape.op("Slice", [last.inputs[0], tape.op("Neg", [count]), end, axis])
    rows = tape.op("Flatten", [positions], {"axis": 2})
    rows.type = last.outputs[0].type
    graph.insert_before(last, tape.nodes)
    last.outputs[0].replace_all_uses_with(rows)
    graph.remove(last, safe=True)
    graph.inputs.append(count)
    logits = graph.outputs[0]
    assert logits.shape is not None
    logits.shape = ir.Shape([contract.ROWS_TO_KEEP, logits.shape[1]])


def _ancestors(value: ir.Value) -> set[ir.Node]:
    found: set[ir.Node] = set()
    values = [value]
    while values:
        node = values.pop().producer()
        if node is not None and node not in found:
            found.add(node)
            values += [source for source in node.inputs if source is not None]
    return found


def _takes_last_position(node: ir.Node) -> bool:
    if node.op_type != "Gather" or node.attributes.get_int("axis", 0) != 1:
        return False
    index = node.inputs[1].const_value if node.inputs[1] else None
    return index is not None and index.size == 1 and int(index.numpy()) == -1


def separate_lookups(model: ir.Model) -> None:
    """Add a second initializer of the same bytes for readers of a multiplied table.

    ONNX Runtime on the CPU packs the weights of products and then frees the original, unless another operator reads it
    too. Of a table that is only looked up, only the pages that are read need memory. A GPU would copy each initializer.
    """
    graph = model.graph
    for name, weight in list(graph.initializers.items()):
        stored = weight.const_value
        # The left operand of a product is not packed.
        readers = [node for node, place in weight.uses() if node.op_type == "Gather" or place == 0]
        if not isinstance(stored, ir.ExternalTensor) or len(readers) in (0, len(weight.uses())):
            continue
        shape = ir.Shape(stored.shape.numpy())
        span = stored.location, stored.offset, stored.length
        tensor = ir.ExternalTensor(*span, stored.dtype, shape=shape, name=f"{name}.rows", base_dir=stored.base_dir)
        rows = ir.Value(name=tensor.name, type=weight.type, shape=weight.shape, const_value=tensor)
        graph.register_initializer(rows)
        for node in readers:
            node.replace_input_with(0, rows)


def fix_capacity(path: Path, capacity: int) -> bytes:
    """Replace the dimension `capacity` by a number, for TensorRT's in-place caches.

    The weights stay in their file, so parse the returned model with `path`.
    """
    model = load_graph(path)
    values = [*model.graph.inputs, *(value for node in model.graph for value in node.outputs)]
    buffers = [(value, list(value.shape)) for value in values if value.shape and _CAPACITY in list(value.shape)]
    if not buffers:
        raise GraphError(f"{path.name}: has no dimension {_CAPACITY!r}; use a graph of the static variant")
    maximum = min(_position_rows(model.graph), default=MAX_SIZE)
    if not 1 <= capacity <= maximum:
        raise GraphError(
            f"{path.name}: capacity is {capacity}, expected 1 to {maximum}, the model's number of positions; "
            "change --max-target-length"
        )
    for value, shape in buffers:
        value.shape = ir.Shape([capacity if dim == _CAPACITY else dim for dim in shape])
    raw: bytes = ir.to_proto(model).SerializeToString(deterministic=True)
    return raw


def _position_rows(graph: ir.Graph) -> list[int]:
    """Return the lengths of tables that are indexed by `cache_lengths` plus an offset."""
    positions = {value for value in graph.inputs if value.name == contract.CACHE_LENGTHS}
    rows = []
    for node in graph:
        if node.op_type in _SAME_POSITION and positions.intersection(node.inputs):
            positions.update(node.outputs)
        table = node.inputs[0].const_value if node.op_type == "Gather" and node.inputs[0] else None
        if table is not None and node.inputs[1] in positions:
            rows.append(table.shape.numpy()[0])
    return rows


def _constant(graph: ir.Graph, name: str, array: np.ndarray[Any, Any]) -> ir.Value:
    value = ir.Value(name=name, const_value=ir.tensor(array, name=name))
    graph.register_initializer(value)
    return value
