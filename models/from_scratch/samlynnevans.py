from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from models.from_scratch.parts import SOURCE, TARGET, D, Tree, attend, causal, layers, std_norm, waves_by_column


class SamLynnEvans(nn.Module):
    """Its own norm; a table with a wavelength for every column."""

    def __init__(self) -> None:
        super().__init__()

        def norm() -> Tree:
            return Tree(alpha=nn.Parameter(torch.ones(D)), bias=nn.Parameter(torch.zeros(D)))

        def norms(count: int) -> dict[str, Tree]:
            return {f"norm_{i}": norm() for i in range(1, count + 1)}

        def attention() -> Tree:
            return Tree(**{name: nn.Linear(D, D) for name in ("q_linear", "v_linear", "k_linear", "out")})

        def network() -> Tree:
            return Tree(linear_1=nn.Linear(D, 24), linear_2=nn.Linear(24, D))

        def side(vocab: int) -> Tree:
            return Tree(embed=Tree(embed=nn.Embedding(vocab, D)), pe=Tree(pe=waves_by_column()[None]), norm=norm())

        self.encoder, self.decoder = side(SOURCE), side(TARGET)
        self.encoder.layers = layers(lambda: Tree(**norms(2), attn=attention(), ff=network()))
        self.decoder.layers = layers(lambda: Tree(**norms(3), attn_1=attention(), attn_2=attention(), ff=network()))
        self.out = nn.Linear(D, TARGET)

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        def normed(part: Tree, x: Tensor) -> Tensor:
            return std_norm(x, part.alpha, part.bias, 1e-6)

        def mix(part: Tree, x: Tensor, memory: Tensor, seen: Tensor) -> Tensor:
            return part.out(attend(part.q_linear(x), part.k_linear(memory), part.v_linear(memory), seen))

        def think(part: Tree, x: Tensor) -> Tensor:
            return part.linear_2(part.linear_1(x).relu())

        def embed(side: Tree, ids: Tensor) -> Tensor:
            return side.embed.embed(ids) * math.sqrt(D) + side.pe.pe[:, : ids.shape[1]]

        memory = embed(self.encoder, source)
        for layer in self.encoder.layers:
            y = normed(layer.norm_1, memory)
            memory = memory + mix(layer.attn, y, y, keep[:, None])
            memory = memory + think(layer.ff, normed(layer.norm_2, memory))
        memory, x = normed(self.encoder.norm, memory), embed(self.decoder, target)
        for layer in self.decoder.layers:
            y = normed(layer.norm_1, x)
            x = x + mix(layer.attn_1, y, y, causal(target))
            x = x + mix(layer.attn_2, normed(layer.norm_2, x), memory, keep[:, None])
            x = x + think(layer.ff, normed(layer.norm_3, x))
        return self.out(normed(self.decoder.norm, x))
