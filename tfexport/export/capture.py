"""Capture a module with `torch.export`, in operators that the ONNX exporter translates as they are.

The exporter traces what it is given once more, to decompose operators that it
does not know, which takes as long as everything else together. Models of the
kind exported here have a few of these operators, which are rewritten instead.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import Node

_ATEN = torch.ops.aten
# What `torch.export` notes of sizes and types holds for every size by the contract, or the graph is refused.
_NOTES = {_ATEN._assert_scalar.default, _ATEN._assert_tensor_metadata.default}


class Lowered(ExportedProgram):
    """A program that has nothing to decompose."""

    def run_decompositions(self, *_: Any, **__: Any) -> ExportedProgram:
        """Return the program itself."""
        return self


def capture(module: nn.Module, inputs: Mapping[str, Tensor], dynamic_shapes: Mapping[str, Any]) -> ExportedProgram:
    """Trace a module.

    Args:
        module: in eval mode; takes one argument, `inputs`.
        inputs: samples by name.
        dynamic_shapes: of each, as `torch.export.export` takes them.

    Raises:
        Exception: as `torch.export.export`, where the module does not trace.
    """
    given: Any = {"kwargs": {"inputs": inputs}, "dynamic_shapes": {"inputs": dynamic_shapes}}
    try:
        return torch.export.export(module, (), **given, strict=False)
    except Exception as error:  # noqa: BLE001 - whatever keeps code of others from being followed
        try:
            # Reads the code of the module, and so knows that `len` of a tensor is no constant.
            return torch.export.export(module, (), **given, strict=True)
        except Exception:  # noqa: BLE001 - the first says more
            raise error from error.__cause__


def lower(program: ExportedProgram) -> ExportedProgram:
    """Rewrite in place what keeps operators from being translated one by one.

    Args:
        program: as `capture` returns it; its operators are changed, what it computes is not.

    Returns:
        The program, as `Lowered` where no operator changes its arguments; else as it was given.
    """
    graph = program.graph
    graph.eliminate_dead_code()
    for node in list(graph.nodes):
        if node.target in _NOTES:
            graph.erase_node(node)
        elif node.target in _REWRITES:
            _REWRITES[node.target](node)
    if any(getattr(node.target, "_schema", None) and node.target._schema.is_mutable for node in graph.nodes):
        return program
    lowered = copy.copy(program)
    lowered.__class__ = Lowered
    return lowered


def _cast(node: Node) -> None:
    """Leave out a cast to the type that a tensor has; what the graph returns keeps its name."""
    source, dtype = _tensor(node), node.args[1]
    node.target, node.args, node.kwargs = _ATEN._to_copy.default, (source,), {"dtype": dtype}
    if source.meta["val"].dtype == dtype:
        _bypass(node)


def _bypass(node: Node) -> None:
    node.replace_all_uses_with(_tensor(node), delete_user_cb=lambda user: user.op != "output")
    if not node.users:
        node.graph.erase_node(node)


def _power(node: Node) -> None:
    node.target, node.args = _ATEN.pow.Tensor_Scalar, (_tensor(node), 2)


def _unflatten(node: Node) -> None:
    dim, sizes = node.args[1:3]
    assert isinstance(dim, int)
    assert isinstance(sizes, list | tuple)
    _reshape(node, dim, dim, sizes)


def _flatten(node: Node) -> None:
    """Multiply sizes in the middle that are numbers; at an end the exporter needs no sizes to flatten."""
    shape, count = _tensor(node).meta["val"].shape, len(node.args)
    start, end = node.args[1] if count > 1 else 0, node.args[2] if count > 2 else -1
    assert isinstance(start, int)
    assert isinstance(end, int)
    start, end = start % len(shape), end % len(shape)
    sizes = [size for size in shape[start : end + 1] if isinstance(size, int)]
    if start and end < len(shape) - 1 and len(sizes) == end + 1 - start:
        _reshape(node, start, end, [math.prod(sizes)])


def _reshape(node: Node, start: int, end: int, sizes: Sequence[Any]) -> None:
    """Give the dimensions from `start` to `end` other sizes, and write out those of the others."""
    source = _tensor(node)
    shape = source.meta["val"].shape
    with node.graph.inserting_before(node):
        before = [_size(source, dim) for dim in range(start % len(shape))]
        after = [_size(source, dim) for dim in range(end % len(shape) + 1, len(shape))]
    node.target, node.args = _ATEN.reshape.default, (source, [*before, *sizes, *after])


def _size(source: Node, dim: int) -> Node | int:
    known = source.meta["val"].shape[dim]
    if isinstance(known, int):
        return known
    size = source.graph.call_function(_ATEN.sym_size.int, (source, dim))
    size.meta["val"] = known
    return size


def _tensor(node: Node) -> Node:
    source = node.args[0]
    assert isinstance(source, Node)
    return source


_REWRITES = {
    _ATEN.to.dtype: _cast,
    _ATEN.detach_.default: _bypass,
    _ATEN.square.default: _power,
    _ATEN.flatten.using_ints: _flatten,
    _ATEN.unflatten.int: _unflatten,
}
