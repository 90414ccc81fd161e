"""What the exporter does more often than it has to, left out: the graphs are the same, byte for byte.

PyTorch and onnxscript have no arguments for these things, so functions of theirs are replaced while a graph is
exported. Versions that keep them elsewhere do them as they always did.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import inspect
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.fx import Interpreter, Node


@contextlib.contextmanager
def shortcuts() -> Iterator[None]:
    """Export with all of them until the block ends."""
    with contextlib.ExitStack() as stack:
        if hasattr(torch.fx.config, "do_not_emit_stack_traces"):
            stack.enter_context(mock.patch.object(torch.fx.config, "do_not_emit_stack_traces", True))
        stack.enter_context(_uncollected())
        for replaced in (_layouts(), _promotion(), _rules()):
            if replaced is not None:
                stack.enter_context(replaced)
        yield


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Let Python look for cycles when a graph is done: it has many objects by then, and little that is garbage."""
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()


def _found(module: str, *names: str) -> list[Any]:
    """Return what a module calls so; nothing where it lacks one of the names."""
    try:
        home = importlib.import_module(module)
        return [functools.reduce(getattr, name.split("."), home) for name in names]
    except (ImportError, AttributeError):
        return []


def _layouts() -> Any:
    """Note of every tensor its shape and strides, and not whether they make one of three layouts as well."""
    module, name = "torch.fx.experimental.proxy_tensor", "_extract_tensor_metadata"
    if not (found := _found(module, name)) or "include_contiguity" not in inspect.signature(found[0]).parameters:
        return None
    return mock.patch(f"{module}.{name}", functools.partial(found[0], include_contiguity=False))


def _promotion() -> Any:
    """Make types explicit without running every operator again: what it gives is known from the trace."""
    module = "torch.onnx._internal.fx.passes.type_promotion"
    names = ("_TypePromotionInterpreter", "_TypePromotionInterpreter.run_node", "get_type_promotion_rule")
    if not (found := _found(module, *names)):
        return None
    interpreter, run_again, rule_of = found

    def run_node(self: Any, node: Node) -> Any:
        is_known = node.op == "call_function" and "val" in node.meta
        if not is_known or getattr(self, "has_promoted", False):  # what comes behind may be of another type now
            return run_again(self, node)
        with self._set_current_node(node):
            if rule := rule_of(node, self.type_promotion_table):
                before = node.target, node.args, node.kwargs
                self._maybe_promote_node(node, rule)
                self.has_promoted = before != (node.target, node.args, node.kwargs)
        return Interpreter.run_node(self, node) if getattr(self, "has_promoted", False) else node.meta["val"]

    return mock.patch.object(interpreter, "run_node", run_node)


def _rules() -> Any:
    """Try a rule where the operator is that it looks for first, and nowhere else."""
    if not (found := _found("onnxscript.rewriter._rewrite_rule", "RewriteRule", "RewriteRule.try_rewrite")):
        return None
    rules, try_rewrite = found

    def try_where_it_fits(self: Any, model: Any, graph: Any, node: Any, **options: Any) -> Any:
        wanted = _first_looked_for(self)
        if wanted is not None and wanted != node.op_identifier():
            return None
        return try_rewrite(self, model, graph, node, **options)

    return mock.patch.object(rules, "try_rewrite", try_where_it_fits)


@functools.cache
def _first_looked_for(rule: Any) -> Any:
    """Return domain, name and overload of the operator that a rule begins to look from; None for any."""
    try:
        outputs = rule._target_pattern.output_nodes
    except AttributeError:  # of another version
        return None
    return outputs[0].op_identifier()
