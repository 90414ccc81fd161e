"""Notebook 002: an encoder without a decoder, with a free head size and one norm that is never used."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


def attend(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """Attend over [batch, heads, len, width]; `keep` broadcasts to [batch, heads, len, len]."""
    scores = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(~keep, -1e9)
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def positions(length: int, d_model: int) -> Tensor:
    """Sines at even and cosines at odd columns, float32 [length, d_model]."""
    angle = torch.arange(length)[:, None] * torch.exp(torch.arange(0, d_model, 2) * (-math.log(10000.0) / d_model))
    return torch.stack((angle.sin(), angle.cos()), -1).flatten(1)


class Attention(nn.Module):
    def __init__(self, d_k: int, d_model: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(d_model, d_k * heads) for _ in range(3))
        self.out = nn.Linear(d_k * heads, d_model)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        parts = (map_(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for map_ in (self.query, self.key, self.value))
        return self.out(attend(*parts, keep))


class Block(nn.Module):
    """A post-norm layer; `ln1` is never used."""

    def __init__(self, d_k: int, d_model: int, heads: int) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(d_model)
        self.attention = Attention(d_k, d_model, heads)
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.ff = nn.Sequential(nn.Linear(d_model, 4 * d_model), nn.GELU(), nn.Linear(4 * d_model, d_model))

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        x = self.norm1(x + self.attention(x, keep))
        return self.norm2(x + self.ff(x))


class Notebook002(nn.Module):
    """An encoder that returns hidden states, [batch, source_len, d_model]."""

    def __init__(self, vocab: int = 31, d_model: int = 32, d_k: int = 12, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, d_model)
        self.pos_encoding = nn.Module()
        self.pos_encoding.register_buffer("pe", positions(24, d_model)[None])
        self.transformer_blocks = nn.Sequential(*(Block(d_k, d_model, heads) for _ in range(layers)))

    def forward(self, source: Tensor, keep: Tensor) -> Tensor:
        x = self.embedding(source) + self.pos_encoding.pe[:, : source.shape[1]]
        for block in self.transformer_blocks:
            x = block(x, keep[:, None, None])
        return x
