from __future__ import annotations

import torch
from torch import Tensor, nn

from models.from_scratch.pieces import HEADS, LENGTH, TARGET, D, causal, merge, softmax_attention, split


class Mixed(nn.Module):
    """Pre-norm encoder, post-norm decoder, learned positions from row 2, one table for source, target and output."""

    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv_proj = nn.ModuleDict({name: nn.Linear(D, D) for name in ("query", "key", "value")})
            self.combine = nn.Linear(D, D)

        def forward(self, x: Tensor, memory: Tensor, keep: Tensor) -> Tensor:
            q, k, v = (split(self.qkv_proj[n](y)) for n, y in (("query", x), ("key", memory), ("value", memory)))
            return self.combine(merge(softmax_attention(q, k, v, keep, (D // HEADS) ** -0.5)))

    class Layer(nn.Module):
        def __init__(self, *, cross: bool) -> None:
            super().__init__()
            self.self_attention, self.self_attention_norm = Mixed.Attend(), nn.LayerNorm(D)
            self.mlp = nn.Sequential(nn.Linear(D, 2 * D), nn.SiLU(), nn.Linear(2 * D, D))
            self.mlp_norm = nn.LayerNorm(D)
            if cross:
                self.memory_attention, self.memory_attention_norm = Mixed.Attend(), nn.LayerNorm(D)

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.position_table = nn.Embedding(TARGET, D), nn.Embedding(LENGTH + 2, D)
        self.encoder = nn.ModuleList(self.Layer(cross=False) for _ in range(2))
        self.decoder = nn.ModuleList(self.Layer(cross=True) for _ in range(2))
        self.encoder_out_norm = nn.LayerNorm(D)

    def embed(self, ids: Tensor) -> Tensor:
        return self.tokens(ids) * D**0.5 + self.position_table(torch.arange(ids.shape[1]) + 2)

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        keep = keep[:, None, None]
        memory = self.embed(source)
        for layer in self.encoder:
            h = layer.self_attention_norm(memory)
            memory = memory + layer.self_attention(h, h, keep)
            memory = memory + layer.mlp(layer.mlp_norm(memory))
        memory = self.encoder_out_norm(memory)
        x = self.embed(target)
        for layer in self.decoder:
            x = layer.self_attention_norm(x + layer.self_attention(x, x, causal(target)))
            x = layer.memory_attention_norm(x + layer.memory_attention(x, memory, keep))
            x = layer.mlp_norm(x + layer.mlp(x))
        return x @ self.tokens.weight.T
