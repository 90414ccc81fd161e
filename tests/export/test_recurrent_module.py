"""A module of one's own with states exports by its two methods: a simple recurrent unit (arXiv:1709.02755)."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from torch import Tensor, nn

from tests import tiny
from tests.export.test_protocol import HEADS, SPEC, VOCAB, D
from tfexport.export import export_module
from tfexport.export.config import ExportConfig
from tfexport.importing.own_module import OwnModule
from tfexport.nn.cache import Cross, KeyValue, Source, StateCache

STATES = dataclasses.replace(SPEC, state_width=D)


class Recurrent(nn.Module):
    """Bags of source words, and a decoder whose only memory are states; tokens have no positions."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target, self.out = nn.Embedding(VOCAB, D), nn.Embedding(VOCAB, D), nn.Linear(D, VOCAB)
        self.layers = nn.ModuleList(
            nn.ModuleDict({name: nn.Linear(D, D) for name in ("key", "value", "query", "forget", "new", "reset")})
            for _ in range(SPEC.layers)
        )

    def encode(self, source_ids: Tensor, source: Source) -> list[KeyValue]:
        x = self.source(source_ids)
        heads = [[part(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (layer["key"], layer["value"])]
                 for layer in self.layers]  # fmt: skip
        return [KeyValue(*pair) for pair in heads]

    def decode_step(self, target_ids: Tensor, cross: Cross, cache: StateCache) -> Tensor:
        x = self.target(target_ids).flatten(0, 1)
        for i, layer in enumerate(self.layers):
            forget, reset = layer["forget"](x).sigmoid(), layer["reset"](x).sigmoid()
            state = cache.recur(i, forget, (1 - forget) * layer["new"](x))
            x = reset * state.tanh() + (1 - reset) * x
            x = x + cross.attend(i, layer["query"](x).unflatten(-1, (HEADS, -1)), scale=1.0)
        return self.out(x.unflatten(0, target_ids.shape)[:, -1])

    def forward(self, source_ids: Tensor, source_mask: Tensor, target_ids: Tensor) -> Tensor:
        """Compute all positions one after the other, without caches."""
        pairs, states, logits = self.encode(source_ids, Source(source_mask)), [torch.zeros(D)] * SPEC.layers, []
        for place in range(target_ids.shape[1]):
            x = self.target(target_ids[:, place])
            for i, layer in enumerate(self.layers):
                forget, reset = layer["forget"](x).sigmoid(), layer["reset"](x).sigmoid()
                states[i] = forget * states[i] + (1 - forget) * layer["new"](x)
                x = reset * states[i].tanh() + (1 - reset) * x
                scores = torch.einsum("bhd,bhsd->bhs", layer["query"](x).unflatten(-1, (HEADS, -1)), pairs[i].key)
                weights = scores.masked_fill(~source_mask[:, None], -torch.inf).softmax(-1)
                x = x + torch.einsum("bhs,bhsd->bhd", weights, pairs[i].value).flatten(1)
            logits.append(self.out(x))
        return torch.stack(logits, 1)


def made() -> Recurrent:
    module = Recurrent()
    tiny.randomise(module)
    return module.eval()


def test_every_variant_is_verified(tmp_path: Path) -> None:
    bundle = export_module(OwnModule(made(), STATES), tmp_path / "b", ExportConfig())
    assert {"decoder", "decoder_static", "decoder_contrib"} < set(bundle.manifest.graphs)
    assert bundle.manifest.parity is not None
    assert bundle.manifest.parity["passed"]
