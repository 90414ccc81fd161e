"""Programs whose operators are rewritten for the exporter compute what the module does, for every size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from tests import tiny
from tfexport.contract import ModelSpec, TokenIds
from tfexport.export._trace import Lowered, _to_onnx, capture, lower, trace_decoder, trace_encoder
from tfexport.export.passes import collapse_reshapes
from tfexport.nn.config import model_spec

SPEC = ModelSpec(
    d_model=6, source_vocab=9, max_source_length=9, tokens=TokenIds(pad=0, start=1, eos=2), precision="fp32"
)
SIZES = [(2, 5), (1, 1), (3, 4), (0, 5), (4, 0)]


class Computes(nn.Module):
    def __init__(self, functions: list[Callable[[Tensor], Tensor]]) -> None:
        super().__init__()
        self.functions = functions

    def forward(self, inputs: dict[str, Tensor]) -> list[Tensor]:
        return [function(inputs["x"]) for function in self.functions]


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "a cast to the same type is what is returned": lambda x: x.to(torch.float32),
    "a cast to the same type on the way": lambda x: x.to(torch.float32) + 1,
    "casts there and back": lambda x: x.to(torch.int64).to(torch.float32) * 0.5,
    "a product of two types": lambda x: x * x.to(torch.int64),
    "unflatten": lambda x: x.unflatten(2, (2, 3)),
    "unflatten, from the end, one size left open": lambda x: x.unflatten(-1, (3, -1)),
    "unflatten into the sizes of another": lambda x: (x.flatten(0, 1) + 1).unflatten(0, x.shape[:2]),
    "flatten in the middle": lambda x: x.unflatten(2, (3, 1, 2)).flatten(2, -2),
    "flatten in the middle, sizes unknown": lambda x: x.unflatten(2, (3, 2)).flatten(1, 2),
    "flatten from the start": lambda x: x.flatten(0, 1) * 2,
    "flatten to the end": lambda x: x.unflatten(2, (3, 2)).flatten(1),
    "reshape": lambda x: x.transpose(1, 2).reshape(x.shape[0], 2, 3, x.shape[1]),
    "reshape that copies": lambda x: x.transpose(1, 2).reshape(x.shape[0], x.shape[1], 2, 3),
    "slices": lambda x: x[:, :, 1:][:][..., :-2] + x[:1, ::2, :1].sum(1, keepdim=True),
    "all axes reversed": lambda x: x.transpose(0, 2).T + 1,
    "the last axes swapped": lambda x: x.mT + 1,
    "square": lambda x: x.square() + 1,
    "whole numbers and others from a fraction": lambda x: (1.5 - x.to(torch.int64)) * (2 - x),
    "a number as a tensor": lambda x: x + torch.tensor(0.5),
    "whole numbers": lambda x: x / 4 + torch.where(x > 1, 2.0, -3.0) + torch.where(x > 1, x, 5),
    "a product of two types, of which one is bool": lambda x: x * (x > 1),
    "a product of two types, or a comparison": lambda x: x.to(torch.int64) > 0.5,
    "a product of two types, of which one is a size": lambda x: x * x.shape[0],
}


@pytest.mark.parametrize("kind", ["flatten", "a product of two types", ""])
def test_rewritten_operators_compute_the_same(kind: str) -> None:
    """One program for each kind: ONNX cannot leave a size open next to a 0, and mixed types take another path."""
    kinds = ("flatten", "a product of two types")
    names = [name for name in FUNCTIONS if (name.startswith(kind) if kind else not name.startswith(kinds))]
    dims = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    program = capture(Computes([FUNCTIONS[name] for name in names]), {"x": torch.zeros(2, 5, 6)}, {"x": dims})
    lowered = lower(program)
    assert isinstance(lowered, Lowered)
    model = _to_onnx(lowered, 18)
    collapse_reshapes(model)
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    for rows, columns in [size for size in SIZES if all(size) or kind != "flatten"]:
        x = torch.randn(rows, columns, 6, generator=torch.Generator().manual_seed(rows)) * 3
        found = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        for name, array in zip(names, found, strict=True):
            np.testing.assert_array_equal(array, FUNCTIONS[name](x).numpy(), name)


def in_place_states(states: Tensor) -> Tensor:
    states[:, :1] = 0.5
    return states.clamp_(min=-1.0)


def scaled_states(states: Tensor) -> Tensor:
    spread, centre = torch.std_mean(states, -1, keepdim=True)
    return (states - centre) / spread * torch.cosine_similarity(states, states + 1, dim=-1)[..., None]


class Encodes(nn.Module):
    def __init__(self, layer: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(9, 6), layer

    def hidden_states(self, source_ids: Tensor, source_mask: Tensor) -> Tensor:
        return self.layer(self.embedding(source_ids) * (1 + source_mask[..., None]))


@pytest.mark.parametrize("layer", [in_place_states, scaled_states])
def test_operators_without_a_translation_are_decomposed(layer: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    module = Encodes(layer).eval()
    graph = ir.to_proto(trace_encoder(module, SPEC, 18))
    session = onnxruntime.InferenceSession(graph.SerializeToString())
    for rows, columns in [(2, 5), (1, 1), (3, 4)]:
        ids, mask = torch.randint(9, (rows, columns)), torch.rand(rows, columns) > 0.3
        names = [given.name for given in session.get_inputs()]
        [found] = session.run(None, dict(zip(names, (ids.numpy(), mask.numpy()), strict=True)))
        with torch.no_grad():
            np.testing.assert_allclose(found, module.hidden_states(ids, mask).numpy(), atol=1e-6)


@pytest.mark.parametrize("name", [pytest.param("pre-std", marks=pytest.mark.slow), "modern"])
def test_the_canonical_model_takes_the_fast_path(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*_: object, **__: object) -> None:
        raise AssertionError("slow path of the exporter")

    monkeypatch.setattr(torch.export.ExportedProgram, "run_decompositions", slow)
    monkeypatch.setattr("torch.onnx._internal.exporter._core.export", slow)
    config = tiny.VARIANTS[name]
    assert config.decoder is not None
    config = replace(config, encoder=replace(config.encoder, layers=1), decoder=replace(config.decoder, layers=1))
    model = tiny.model(config, dtype=torch.float32)
    spec = model_spec(model.config, "fp32")
    assert trace_encoder(model, spec, 18).graph.outputs
    assert trace_decoder(model, spec, "static", 24).graph.outputs
