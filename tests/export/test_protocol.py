"""A module that no layout expresses exports by its two methods: ALiBi, capped scores by hand, parallel sublayers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests import tiny
from tfexport.contract import ModelSpec, TokenIds
from tfexport.export import export_module
from tfexport.export.config import ExportConfig
from tfexport.importing.own_module import OwnModule
from tfexport.nn.cache import Cache, Cross, KeyValue, Source
from tfexport.nn.source import PaddedSource

VOCAB, D, HEADS, LAYERS, LENGTH = 37, 32, 4, 2, 20
WIDTH = D // HEADS


def slopes(positions: Tensor, keys: int) -> Tensor:
    """Penalise distance, each head with its own slope (arXiv:2108.12409)."""
    distance = positions[:, None, :, None] - torch.arange(keys)
    return -distance * 2.0 ** -torch.arange(1, HEADS + 1)[:, None, None]


def capped(scores: Tensor) -> Tensor:
    """Keep scores within ±2, as Gemma 2 does within ±50 (arXiv:2408.00118)."""
    return 2 * torch.tanh(scores / 2)


def by_hand(query: Tensor, new: KeyValue, bias: Tensor | None, cache: Any, layer: int) -> Tensor:
    """Attend in a way that `cache.attend` does not know, to what it keeps all the same; [rows, target_len, D]."""
    kept = cache.update(layer, new)
    scores = capped(query.transpose(1, 2) @ kept.key.mT / WIDTH**0.5 + bias)
    weights = torch.where(cache.mask, scores, -1e4).softmax(-1)
    return (weights @ kept.value).transpose(1, 2).flatten(2)


class Parallel(nn.Module):
    def __init__(self, *, cross: bool) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)
        if cross:
            self.cross_q, self.cross_kv, self.cross_out = nn.Linear(D, D), nn.Linear(D, 2 * D), nn.Linear(D, D)

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (HEADS, WIDTH))

    def network(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class ByHand(nn.Module):
    """ALiBi on both sides and capped scores in the decoder; no position table, parallel sublayers."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCAB, D), nn.Embedding(VOCAB, D)
        self.encoder = nn.ModuleList(Parallel(cross=False) for _ in range(LAYERS))
        self.decoder = nn.ModuleList(Parallel(cross=True) for _ in range(LAYERS))
        self.out = nn.Linear(D, VOCAB)

    def own(self, layer: Parallel, y: Tensor) -> list[Tensor]:
        """Project to query, key and value, [rows, len, heads, d]."""
        return [layer.heads(part) for part in layer.qkv(y).chunk(3, -1)]

    def encode(self, source_ids: Tensor, source: Source) -> list[KeyValue]:
        x = self.source(source_ids)
        positions = torch.arange(source_ids.shape[1])[None]
        bias = slopes(positions, source_ids.shape[1])
        for i, layer in enumerate(self.encoder):
            y = layer.norm(x)
            parts = (part.flatten(0, 1) for part in self.own(layer, y))
            found = source.attend(i, *parts, bias, scale=WIDTH**-0.5).unflatten(0, source_ids.shape)
            x = x + layer.out(found) + layer.network(y)
        return [
            KeyValue(*(layer.heads(part).transpose(1, 2) for part in layer.cross_kv(x).chunk(2, -1)))
            for layer in self.decoder
        ]

    def decode_step(self, target_ids: Tensor, cross: Cross, cache: Cache) -> Tensor:
        x, positions = self.target(target_ids), cache.positions
        bias = slopes(positions, cache.key_len)
        for i, layer in enumerate(self.decoder):
            y = layer.norm(x)
            query, key, value = self.own(layer, y)
            found = by_hand(query, KeyValue(key.transpose(1, 2), value.transpose(1, 2)), bias, cache, i)
            look = cross.attend(i, layer.heads(layer.cross_q(y)).flatten(0, 1), scale=WIDTH**-0.5)
            x = x + layer.out(found) + layer.cross_out(look.unflatten(0, target_ids.shape)) + layer.network(y)
        return self.out(x[:, -1])

    def whole(self, source_ids: Tensor, source_mask: Tensor, target_ids: Tensor) -> Tensor:
        """All positions at once, with the decoder's attention written out: independent of caches and of `attend`."""
        cross = self.encode(source_ids, PaddedSource(source_mask))
        x, positions = self.target(target_ids), torch.arange(target_ids.shape[1])[None]
        causal = torch.ones(target_ids.shape[1], target_ids.shape[1], dtype=torch.bool).tril()
        for layer, memory in zip(self.decoder, cross, strict=True):
            y = layer.norm(x)
            query, key, value = (part.transpose(1, 2) for part in self.own(layer, y))
            scores = capped(query @ key.mT / WIDTH**0.5 + slopes(positions, target_ids.shape[1]))
            found = scores.masked_fill(~causal, -torch.inf).softmax(-1) @ value
            looked = (layer.heads(layer.cross_q(y)).transpose(1, 2) @ memory.key.mT / WIDTH**0.5).masked_fill(
                ~source_mask[:, None, None], -torch.inf
            ).softmax(-1) @ memory.value
            merged = [t.transpose(1, 2).flatten(2) for t in (found, looked)]
            x = x + layer.out(merged[0]) + layer.cross_out(merged[1]) + layer.network(y)
        return self.out(x)


SPEC = ModelSpec(
    d_model=D,
    source_vocab=VOCAB,
    max_source_length=LENGTH,
    tokens=TokenIds(pad=0, start=1, eos=2),
    precision="fp32",
    vocab=VOCAB,
    layers=LAYERS,
    heads=HEADS,
    head_dim=WIDTH,
    value_dim=WIDTH,
    max_target_length=LENGTH,
)


def made() -> ByHand:
    model = ByHand()
    tiny.randomise(model)
    return model.eval()


def test_every_step_equals_a_run_over_all_positions(tmp_path: Path) -> None:
    """In both variants that allow attention by hand, in logits and whole decodes."""
    own = OwnModule(made(), SPEC, lambda model, *inputs: model.whole(*inputs))
    bundle = export_module(own, tmp_path / "b", ExportConfig(variants=("concat", "static")))
    parity = json.loads((bundle.path / "parity.json").read_text())
    assert {check["stage"] for check in parity["numbers"]} >= {"eager cached", "ort concat", "ort static"}
    assert parity["passed"]
