from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.from_scratch.pieces import HEADS, LENGTH, SOURCE, TARGET, D, causal, merge, softmax_attention


class Alternating(nn.Module):
    """One list in which attention and feed-forward network alternate; fused projections by head, keys first."""

    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kqv, self.o, self.norm = nn.Linear(D, 3 * D), nn.Linear(D, D), nn.LayerNorm(D)

        def forward(self, x: Tensor, memory: Tensor, keep: Tensor) -> Tensor:
            q = self.kqv(x).unflatten(-1, (HEADS, 3, -1)).transpose(1, 2)[..., 1, :]
            k, _, v = self.kqv(memory).unflatten(-1, (HEADS, 3, -1)).transpose(1, 2).unbind(3)
            return self.o(merge(softmax_attention(q, k, v, keep, (D // HEADS) ** -0.5)))

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.norm = nn.Linear(D, 40), nn.Linear(40, D), nn.LayerNorm(D)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(F.gelu(self.up(x)))

    def __init__(self) -> None:
        super().__init__()
        self.enc_embed, self.dec_embed = nn.Embedding(SOURCE, D), nn.Embedding(TARGET, D)
        self.pos = nn.Parameter(torch.randn(1, LENGTH, D))
        self.enc = nn.ModuleList(part() for _ in range(2) for part in (self.Attend, self.Network))
        self.dec = nn.ModuleList(part() for _ in range(2) for part in (self.Attend, self.Attend, self.Network))
        self.enc_final, self.dec_final = nn.LayerNorm(D), nn.LayerNorm(D)
        self.out = nn.Linear(D, TARGET)

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        keep = keep[:, None, None]
        memory = self.enc_embed(source) + self.pos[0, : source.shape[1]]
        for attend, network in zip(self.enc[0::2], self.enc[1::2], strict=True):
            h = attend.norm(memory)
            memory = memory + attend(h, h, keep)
            memory = memory + network(network.norm(memory))
        memory = self.enc_final(memory)
        x = self.dec_embed(target) + self.pos[0, : target.shape[1]]
        for own, cross, network in zip(self.dec[0::3], self.dec[1::3], self.dec[2::3], strict=True):
            h = own.norm(x)
            x = x + own(h, h, causal(target))
            x = x + cross(cross.norm(x), memory, keep)
            x = x + network(network.norm(x))
        return self.out(self.dec_final(x))
