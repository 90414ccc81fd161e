"""Capture a module with `torch.export`, in operators that the exporter translates.

To decompose operators that it does not know, the exporter traces the program again, which takes as long as the rest of
the export. Transformers have only a few of these operators, and this module rewrites them.
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
# Assertions about sizes and types, which the graphs do not need.
_NOTES = {_ATEN._assert_scalar.default, _ATEN._assert_tensor_metadata.default}


class Lowered(ExportedProgram):
    """A program without operators to decompose."""

    def run_decompositions(self, *_: Any, **__: Any) -> ExportedProgram:
        """Return the program itself."""
        return self


def capture(module: nn.Module, inputs: Mapping[str, Tensor], dynamic_shapes: Mapping[str, Any]) -> ExportedProgram:
    """Trace a module in eval mode that takes one argument, `inputs`.

    Raises the errors of `torch.export.export`.
    """
    given: Any = {"kwargs": {"inputs": inputs}, "dynamic_shapes": {"inputs": dynamic_shapes}}
    try:
        return torch.export.export(module, (), **given, strict=False)
    except Exception as error:  # noqa: BLE001 - a user's code can fail to trace in any way
        try:
            # Strict mode analyzes the code of the module, so `len` of a tensor is not a constant.
            return torch.export.export(module, (), **given, strict=True)
        except Exception:  # noqa: BLE001 - the first error is more helpful
            raise error from error.__cause__


def lower(program: ExportedProgram) -> ExportedProgram:
    """Rewrite the operators in place that the exporter does not translate directly.

    Returns:
        The program as `Lowered`, or unchanged if an operator mutates its arguments.
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


def promotes(program: ExportedProgram) -> bool:
    """Return whether an operator may convert the type of an argument implicitly.

    ONNX operators never do so.
    """
    return any(_promotes(node) for node in program.graph.nodes if getattr(node.target, "namespace", "") == "aten")


def _promotes(node: Node) -> bool:
    result = node.meta.get("val")
    if node.target is _ATEN._to_copy.default or not isinstance(result, Tensor):
        return False
    values = [arg.meta["val"] if isinstance(arg, Node) else arg for arg in node.args]
    types = {value.dtype for value in values if isinstance(value, Tensor)}
    if torch.Tag.pointwise not in getattr(node.target, "tags", ()):
        return bool(types) and result.dtype not in types
    types -= {torch.bool}  # conditions are bool
    if result.dtype != torch.bool:
        types.add(result.dtype)
    types |= {torch.int64 for value in values if isinstance(value, int | torch.SymInt)}
    types |= {torch.float32 for value in values if isinstance(value, float | torch.SymFloat)}
    return len(types) > 1


def _cast(node: Node) -> None:
    """Remove a cast that does not change the type, except at an output of the graph."""
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
    # Only known sizes in the middle; at either end the exporter flattens without sizes.
    shape, count = _tensor(node).meta["val"].shape, len(node.args)
    start, end = node.args[1] if count > 1 else 0, node.args[2] if count > 2 else -1
    assert isinstance(start, int)
    assert isinstance(end, int)
    start, end = start % len(shape), end % len(shape)
    sizes = [size for size in shape[start : end + 1] if isinstance(size, int)]
    if start and end < len(shape) - 1 and len(sizes) == end + 1 - start:
        _reshape(node, start, end, [math.prod(sizes)])


def _reshape(node: Node, start: int, end: int, sizes: Sequence[Any]) -> None:
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
