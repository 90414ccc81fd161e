from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.from_scratch.parts import HEADS, SOURCE, TARGET, D, Tree, attend, causal, layers


class Ajhalthor(nn.Module):
    """Projections fused within each head: queries, keys and values; across, keys and values."""

    def __init__(self) -> None:
        super().__init__()

        def norm() -> Tree:
            return Tree(gamma=nn.Parameter(torch.ones(D)), beta=nn.Parameter(torch.zeros(D)))

        def attention() -> Tree:
            return Tree(qkv_layer=nn.Linear(D, 3 * D), linear_layer=nn.Linear(D, D))

        def across() -> Tree:
            return Tree(kv_layer=nn.Linear(D, 2 * D), q_layer=nn.Linear(D, D), linear_layer=nn.Linear(D, D))

        def network() -> Tree:
            return Tree(linear1=nn.Linear(D, 24), linear2=nn.Linear(24, D))

        def side(vocab: int) -> Tree:
            return Tree(sentence_embedding=Tree(embedding=nn.Embedding(vocab, D)))

        self.encoder, self.decoder = side(SOURCE), side(TARGET)
        self.encoder.layers = layers(lambda: Tree(attention=attention(), norm1=norm(), ffn=network(), norm2=norm()))
        self.decoder.layers = layers(
            lambda: Tree(
                self_attention=attention(),
                layer_norm1=norm(),
                encoder_decoder_attention=across(),
                layer_norm2=norm(),
                ffn=network(),
                layer_norm3=norm(),
            )
        )
        self.linear = nn.Linear(D, TARGET)

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        def normed(part: Tree, x: Tensor) -> Tensor:
            return F.layer_norm(x, (D,), part.gamma, part.beta, 1e-5)

        def by_head(fused: Tensor, parts: int) -> list[Tensor]:
            return [part.flatten(2) for part in fused.unflatten(-1, (HEADS, -1)).chunk(parts, -1)]

        def mix(part: Tree, x: Tensor, seen: Tensor) -> Tensor:
            q, k, v = by_head(part.qkv_layer(x), 3)
            return part.linear_layer(attend(q, k, v, seen))

        def look(part: Tree, x: Tensor, memory: Tensor) -> Tensor:
            k, v = by_head(part.kv_layer(memory), 2)
            return part.linear_layer(attend(part.q_layer(x), k, v, keep[:, None]))

        def think(part: Tree, x: Tensor) -> Tensor:
            return part.linear2(part.linear1(x).relu())

        def embed(side: Tree, ids: Tensor) -> Tensor:
            angle = torch.arange(ids.shape[1])[:, None] / torch.pow(10000, torch.arange(0, D, 2).float() / D)
            return side.sentence_embedding.embedding(ids) + torch.stack((angle.sin(), angle.cos()), 2).flatten(1)

        memory = embed(self.encoder, source)
        for layer in self.encoder.layers:
            memory = normed(layer.norm1, mix(layer.attention, memory, keep[:, None]) + memory)
            memory = normed(layer.norm2, think(layer.ffn, memory) + memory)
        x = embed(self.decoder, target)
        for layer in self.decoder.layers:
            x = normed(layer.layer_norm1, mix(layer.self_attention, x, causal(target)) + x)
            x = normed(layer.layer_norm2, look(layer.encoder_decoder_attention, x, memory) + x)
            x = normed(layer.layer_norm3, think(layer.ffn, x) + x)
        return self.linear(x)
