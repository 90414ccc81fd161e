"""Exporting with shortcuts gives the same bytes, where types are promoted and where they are not."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Mapping

import onnx_ir as ir
import pytest
import torch
from onnxscript.rewriter import RewriteRule, RewriteRuleSet
from torch import Tensor, nn

from tfexport.export.capture import capture, lower
from tfexport.export.shortcuts import shortcuts


class Mixed(nn.Module):
    """Types that meet in the middle and behind it."""

    def forward(self, inputs: Mapping[str, Tensor]) -> list[Tensor]:
        x, ids = inputs["x"], inputs["ids"]
        scaled = (ids + torch.arange(ids.shape[1])) * 0.5 + x.half()
        first, second = torch.softmax(scaled @ x.transpose(0, 1).to(scaled.dtype), -1).topk(2)
        return [scaled.relu().clamp(0, 3), first, (second / 2).sum(1), torch.where(ids > 1, x, 0) ** 2]


class Alike(nn.Module):
    """One type throughout."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, inputs: Mapping[str, Tensor]) -> list[Tensor]:
        x = self.norm(inputs["x"])
        return [torch.relu(self.linear(x)).unflatten(1, (2, 2)).transpose(0, 1) * 2 + 1]


def exported(module: nn.Module, inputs: dict[str, Tensor], around: contextlib.AbstractContextManager[None]) -> bytes:
    with around, torch.no_grad():
        program = capture(module.eval(), inputs, {name: {0: torch.export.Dim.DYNAMIC} for name in inputs})
        made = torch.onnx.export(lower(program), dynamo=True, opset_version=18, optimize=True, verbose=False)
    assert made is not None
    for value in (made.model, made.model.graph, *made.model.graph):
        value.metadata_props.clear()  # says where in the code it was
    return ir.to_proto(made.model).SerializeToString(deterministic=True)


@pytest.mark.parametrize("module", [Mixed(), Alike()])
def test_the_bytes_are_the_same(module: nn.Module) -> None:
    inputs = {"x": torch.randn(3, 4), "ids": torch.arange(12).reshape(3, 4)}
    plain = exported(module, inputs, contextlib.nullcontext())
    assert exported(module, inputs, shortcuts()) == plain
    assert len(plain) > 500


@pytest.mark.parametrize("around", [contextlib.nullcontext(), shortcuts()])
def test_a_rule_that_looks_for_several_operators_still_applies(
    around: contextlib.AbstractContextManager[None],
) -> None:
    x = ir.val("x", ir.DataType.FLOAT, [3, 4])
    nodes = [ir.Node("", operator, [x], num_outputs=1) for operator in ("Abs", "Neg", "Relu")]
    outputs = [node.outputs[0] for node in nodes]
    model = ir.Model(ir.Graph([x], outputs, nodes=nodes, opset_imports={"": 18}, name="g"), ir_version=10)
    rule = RewriteRule(lambda op, x: (op.Relu(x), op.Neg(x)), lambda op, x: (op.Sin(x), op.Cos(x)))
    with around:
        RewriteRuleSet([rule]).apply_to_model(model)
    assert {node.op_type for node in model.graph} == {"Abs", "Sin", "Cos"}


def test_nothing_stays_replaced() -> None:
    before = torch.fx.config.do_not_emit_stack_traces
    with shortcuts():
        assert torch.fx.config.do_not_emit_stack_traces
        assert not gc.isenabled()
    assert torch.fx.config.do_not_emit_stack_traces == before
    assert gc.isenabled()
