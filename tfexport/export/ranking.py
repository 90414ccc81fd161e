"""Rank the vocabulary in 8 bits, with a proof that the best tokens are right.

A decoder that nobody asks for scores needs no exact logit of most tokens. Let h be the hidden state, w a row of the
table, ŵ its rounded row, and ĥ the rounded hidden state. Cauchy and Schwarz bound the error of the product of integers:

    |w·h - ŵ·ĥ| ≤ ‖w - ŵ‖ ‖h‖ + ‖ŵ‖ ‖h - ĥ‖

The product of integers, with this bound as its bias, is no less than any logit. The tokens that it ranks first get
their exact logits. If these are better than the next bound, no other token can be among the best. Rows without this
proof, also those with NaN, get the fp32 product with the whole table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from tfexport import contract
from tfexport.export.graph_file import read_weight
from tfexport.export.passes import best_of_blocks, top_k
from tfexport.export.quantize._linear import linear_maps

# A table of 2 million weights gains at most 18 %, and one of a million loses; a file of ONNX has at most 2 GB.
LEAST_WEIGHTS, _MOST_WEIGHTS = 4_000_000, 2**30
# Tokens of each row that get exact logits.
_NUM_RANKED = 48
# Kernels for CPUs without VNNI add two products of uint8 and int8 in 16 bits: 2 · 255 · 63 does not saturate.
_LARGEST = 63
# ONNX Runtime finds maxima of smaller blocks as fast, and then sorts fewer numbers.
_BLOCK = 64
_EPS = 2.0**-24  # of rounding to float32
# Exact logits closer than this, in units of ‖w‖ ‖h‖, may be in another order in a product that adds them otherwise. The
# usual difference of two such products is 1 to 12 `_EPS`.
_TIE = 64 * _EPS
_BY_ROW = {"axis": 1}


class RankingTable(NamedTuple):
    """A table [vocab, width] in 8 bits and the bounds of its error, of each token."""

    values: NDArray[np.int8]  # [width, vocab]
    scales: NDArray[np.float32]  # [vocab]
    bounds: NDArray[np.float32]  # [2, vocab]; times ‖h‖ and ‖h - ĥ‖, they bound the error
    bias: NDArray[np.float32]  # [vocab], and the error of rounding it
    ties: NDArray[np.float32]  # [2, 1]; times ‖h‖ and ‖h - ĥ‖, the difference of exact logits that count as equal
    tie: NDArray[np.float32]  # [1, 1], to add to it


def ranking_table(table: NDArray[np.float32], bias: NDArray[np.float32] | None) -> RankingTable:
    """Round a table, and bound the error in every order of summation."""
    exact = table.astype(np.float64)
    scales = np.maximum(np.abs(exact).max(1) / _LARGEST, 2.0**-126).astype(np.float32)
    values = np.rint(exact / scales[:, None].astype(np.float64)).clip(-_LARGEST, _LARGEST).astype(np.int8)
    rounded = values * scales[:, None].astype(np.float64)
    norm, largest_bias = float(np.linalg.norm(exact, axis=1).max()), 0.0 if bias is None else float(np.abs(bias).max())
    # Of a product, its exact repetition, the integer product, its scaling and its bound.
    slack = (2 * table.shape[1] + 64) * _EPS
    errors = np.linalg.norm(exact - rounded, axis=1) * (1 + slack) + norm * slack
    bounds = np.stack((errors, np.linalg.norm(rounded, axis=1) * (1 + slack)))
    raised = (0.0 if bias is None else bias) + np.full(len(table), slack * largest_bias)
    # The second number only passes on NaN and infinity.
    ties, tie = np.array([[_TIE * norm], [_EPS * norm]]), np.array([[_TIE * largest_bias]])
    floats = (part.astype(np.float32) for part in (bounds, raised, ties, tie))
    return RankingTable(values.T.copy(), scales, *floats)


def rank_without_scores(model: ir.Model) -> None:
    """Add the optional input `without_scores` to a decoder.

    Its weights are in the weight file, and the selection of tokens is appended. Decoders with a small projection, or
    one that is not plain, are left as they are.
    """
    graph = model.graph
    projection = graph.outputs[0].producer()
    found = next((one for one in linear_maps(graph) if one.node is projection and one.is_plain), None)
    if projection is None or found is None or projection.op_type != "Gemm" or found.weight is not projection.inputs[1]:
        return
    table = read_weight(found.weight) if found.outputs == 0 else np.empty((0, 0), np.float32)
    if not LEAST_WEIGHTS <= table.size <= _MOST_WEIGHTS or len(table) <= _NUM_RANKED or table.dtype != np.float32:
        return
    selection = _from(graph, projection)
    graph.remove(selection)
    bias = None if found.bias is None or found.bias.const_value is None else found.bias.const_value.numpy()
    ranked = _Ranking(graph, projection, ranking_table(table, bias)).branch(len(table))
    flag = _initializer(graph, contract.WITHOUT_SCORES, np.array(False))
    graph.inputs.append(flag)  # an input with a default
    exact = [graph.outputs.pop(0) for _ in range(4)]  # logits, ids, their logits, normalizer
    names = [output.name for output in exact]
    choice = _choose(flag, ranked, _branch("full", selection, exact))
    for name, former, output in zip(names, exact, choice.outputs, strict=True):
        output.name, output.type, output.shape = name, former.type, former.shape
    graph.outputs[:0] = choice.outputs
    graph.append(choice)
    model.opset_imports.setdefault("com.microsoft", 1)


class _Ranking:
    """Build the branch of a graph that ranks."""

    def __init__(self, graph: ir.Graph, projection: ir.Node, table: RankingTable) -> None:
        hidden, weight, *bias = projection.inputs
        assert hidden is not None
        assert weight is not None
        self._graph, self._hidden, self._weight, self._bias = graph, hidden, weight, bias[0] if bias else None
        self._count = next(value for value in graph.inputs if value.name == contract.NUM_CANDIDATES)
        numbers = {"zero": 0, "one": 1, "last": -1, "ranked": _NUM_RANKED, "next": _NUM_RANKED + 1}
        arrays = table._asdict() | {name: np.array([number]) for name, number in numbers.items()}
        self._at = {name: _initializer(graph, f"ranking.{name}", array) for name, array in arrays.items()}

    def branch(self, vocab: int) -> ir.Graph:
        """Return the branch, with the outputs of the decoder's selection."""
        tape, at = ir.tape.Tape(), self._at
        bounds, ids, tie = self._ranked(tape, vocab)
        bound = tape.op("Slice", [bounds, at["ranked"], at["next"], at["one"]])
        ids = tape.op("Slice", [ids, at["zero"], at["ranked"], at["one"]])
        logits, places = top_k(tape, self._exact(tape, ids), tape.op("Add", [self._count, at["one"]]))
        best, places = (tape.op("Slice", [part, at["zero"], self._count, at["one"]]) for part in (logits, places))
        others = tape.op("Slice", [logits, at["one"], at["next"], at["one"]])
        gap = tape.op("ReduceMin", [tape.op("Sub", [best, others]), at["one"]])
        is_best = tape.op("Greater", [tape.op("ReduceMin", [best, at["one"]]), bound])
        unproven = tape.op("Not", [tape.op("And", [is_best, tape.op("Greater", [gap, tie])])])
        ids = tape.op("GatherElements", [ids, places], _BY_ROW)
        rows = tape.op("Transpose", [tape.op("NonZero", [tape.op("Squeeze", [unproven, at["one"]])])])
        is_any = tape.op("Greater", [tape.op("Shape", [rows], {"end": 1}), at["zero"]])
        unchanged = ir.tape.Tape()
        same = [unchanged.op("Identity", [part]) for part in (ids, best)]
        again = _choose(is_any, self._again(rows, ids, best, vocab), _branch("ranking.kept", unchanged.nodes, same))
        none = tape.op("ConstantOfShape", [_initializer(self._graph, "ranking.none", np.array([0, vocab]))])
        needed = tape.op("Cast", [unproven], {"to": ir.DataType.FLOAT})
        return _branch("ranking", [*tape.nodes, again], [none, *again.outputs, needed])

    def _ranked(self, tape: ir.tape.Tape, vocab: int) -> tuple[ir.Value, ir.Value, ir.Value]:
        """Return the largest upper bounds of logits, their ids, and what is a tie."""
        at, hidden = self._at, self._hidden
        rounded = tape.op_multi_out("DynamicQuantizeLinear", [hidden], num_outputs=3)
        values, scale, zero_point = rounded
        error = tape.op("Sub", [hidden, tape.op("DequantizeLinear", rounded)])
        norms = tape.op("Concat", [tape.op("ReduceL2", [part, at["one"]]) for part in (hidden, error)], _BY_ROW)
        # One bias for all rows, because another pass over the logits would take longer.
        largest = tape.op("ReduceMax", [norms, at["zero"]])
        bias = tape.op("Squeeze", [tape.op("Gemm", [largest, at["bounds"], at["bias"]]), at["zero"]])
        read = [values, at["values"], scale, at["scales"], zero_point, None, bias]
        logits = tape.op("MatMulIntegerToFloat", read, domain="com.microsoft")
        best, ids = best_of_blocks(self._graph, tape, logits, at["next"], vocab, name="ranking.blocks", block=_BLOCK)
        return best, ids, tape.op("Gemm", [norms, at["ties"], at["tie"]])

    def _exact(self, tape: ir.tape.Tape, ids: ir.Value) -> ir.Value:
        """Return the exact logits of tokens [rows, tokens]."""
        weights = tape.op("Gather", [self._weight, ids])
        product = tape.op("MatMul", [weights, tape.op("Unsqueeze", [self._hidden, self._at["last"]])])
        return self._with_bias(tape, tape.op("Squeeze", [product, self._at["last"]]), ids)

    def _with_bias(self, tape: ir.tape.Tape, logits: ir.Value, ids: ir.Value | None = None) -> ir.Value:
        if self._bias is None:
            return logits
        return tape.op("Add", [logits, self._bias if ids is None else tape.op("Gather", [self._bias, ids])])

    def _again(self, rows: ir.Value, ids: ir.Value, best: ir.Value, vocab: int) -> ir.Graph:
        """Return a branch that replaces some rows by the best of all exact logits."""
        tape = ir.tape.Tape()
        hidden = tape.op("GatherND", [self._hidden, rows])
        # As its left operand the table is read where it is; ONNX Runtime would copy a right one.
        product = tape.op("Transpose", [tape.op("Gemm", [self._weight, hidden], {"transB": 1})])
        logits = self._with_bias(tape, product)
        found = best_of_blocks(self._graph, tape, logits, self._count, vocab, name="ranking.all_blocks")
        merged = [tape.op("ScatterND", [old, rows, new]) for old, new in zip((best, ids), found, strict=True)]
        return _branch("ranking.again", tape.nodes, merged[::-1])


def _from(graph: ir.Graph, first: ir.Node) -> list[ir.Node]:
    """Return a node and those that depend on it, in their order."""
    found, made = [first], set(first.outputs)
    for node in graph:
        if node is not first and made.intersection(node.inputs):
            found.append(node)
            made.update(node.outputs)
    return found


def _branch(name: str, nodes: Sequence[ir.Node], outputs: Sequence[ir.Value]) -> ir.Graph:
    # A branch must not repeat names of the graph around it.
    for number, value in enumerate(value for node in nodes for value in node.outputs):
        value.name = f"{name}.{number}"
    return ir.Graph([], outputs, nodes=nodes, name=name)


def _choose(condition: ir.Value, then: ir.Graph, otherwise: ir.Graph) -> ir.Node:
    branches = [ir.AttrGraph("then_branch", then), ir.AttrGraph("else_branch", otherwise)]
    return ir.Node("", "If", [condition], branches, num_outputs=len(then.outputs))


def _initializer(graph: ir.Graph, name: str, array: NDArray[Any]) -> ir.Value:
    tensor = ir.tensor(array, name=name)
    value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape), const_value=tensor)
    graph.register_initializer(value)
    return value
