from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from models.from_scratch.parts import LAYERS, LENGTH, SOURCE, TARGET, D, Tree, attend, causal, std_norm


class Leviswind(nn.Module):
    """As Kyubyong's: a ReLU after queries, keys and values, no output projection, layers that are numbered names."""

    def __init__(self) -> None:
        super().__init__()

        def norm() -> Tree:
            return Tree(gamma=nn.Parameter(torch.ones(D)), beta=nn.Parameter(torch.zeros(D)))

        def attention() -> Tree:
            maps = {f"{name}_proj": nn.Sequential(nn.Linear(D, D), nn.ReLU()) for name in "QKV"}
            return Tree(**maps, normalization=norm())

        def network() -> Tree:
            wide = nn.Sequential(nn.Linear(D, 24), nn.ReLU())
            return Tree(conv1=wide, conv2=nn.Linear(24, D), normalization=norm())

        def table(rows: int) -> Tree:
            return Tree(lookup_table=nn.Parameter(torch.randn(rows, D)))

        self.enc_emb, self.enc_positional_encoding = table(SOURCE), table(LENGTH)
        for i in range(LAYERS):
            setattr(self, f"enc_self_attention_{i}", attention())
            setattr(self, f"enc_feed_forward_{i}", network())
        self.dec_emb, self.dec_positional_encoding = table(TARGET), table(LENGTH)
        for i in range(LAYERS):
            setattr(self, f"dec_self_attention_{i}", attention())
            setattr(self, f"dec_vanilla_attention_{i}", attention())
            setattr(self, f"dec_feed_forward_{i}", network())
        self.logits_layer = nn.Linear(D, TARGET)

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        def normed(part: Tree, x: Tensor) -> Tensor:
            return std_norm(x, part.normalization.gamma, part.normalization.beta, 1e-8)

        def mix(part: Any, x: Tensor, memory: Tensor, seen: Tensor) -> Tensor:
            return normed(part, x + attend(part.Q_proj(x), part.K_proj(memory), part.V_proj(memory), seen))

        def think(part: Any, x: Tensor) -> Tensor:
            return normed(part, x + part.conv2(part.conv1(x)))

        def embed(table: Tree, positions: Tree, ids: Tensor) -> Tensor:
            return table.lookup_table[ids] * D**0.5 + positions.lookup_table[: ids.shape[1]]

        memory = embed(self.enc_emb, self.enc_positional_encoding, source)
        for i in range(LAYERS):
            memory = mix(getattr(self, f"enc_self_attention_{i}"), memory, memory, keep[:, None])
            memory = think(getattr(self, f"enc_feed_forward_{i}"), memory)
        x = embed(self.dec_emb, self.dec_positional_encoding, target)
        for i in range(LAYERS):
            x = mix(getattr(self, f"dec_self_attention_{i}"), x, x, causal(target))
            x = mix(getattr(self, f"dec_vanilla_attention_{i}"), x, memory, keep[:, None])
            x = think(getattr(self, f"dec_feed_forward_{i}"), x)
        return self.logits_layer(x)
