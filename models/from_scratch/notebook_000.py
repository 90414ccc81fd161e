"""Notebook 000, repaired: post-norm, fused projections, eps added after the division of the norm."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


def attend(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """Attend over [batch, heads, len, width]; `keep` broadcasts to [batch, heads, len, len]."""
    scores = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(~keep, -1e9)
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def causal(ids: Tensor) -> Tensor:
    return torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()


def positions(length: int, d_model: int) -> Tensor:
    """Sines at even and cosines at odd columns, float32 [length, d_model]."""
    angle = torch.arange(length)[:, None] * torch.exp(torch.arange(0, d_model, 2) * (-math.log(10000.0) / d_model))
    return torch.stack((angle.sin(), angle.cos()), -1).flatten(1)


class LayerNormalization(nn.Module):
    """Eps is added after the division."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.ones(d_model)), nn.Parameter(torch.zeros(d_model))

    def forward(self, x: Tensor) -> Tensor:
        return self.gamma * ((x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True) + 1e-5) + self.beta


class FusedAttention(nn.Module):
    """One projection; each head's queries, keys and values are next to each other."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv_layer, self.linear_layer = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        q, k, v = self.qkv_layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2).chunk(3, -1)
        return self.linear_layer(attend(q, k, v, keep))


class FusedCrossAttention(nn.Module):
    """Keys and values come from one projection, queries from another."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.kv_layer, self.q_layer = nn.Linear(d_model, 2 * d_model), nn.Linear(d_model, d_model)
        self.linear_layer = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor, y: Tensor, keep: Tensor) -> Tensor:
        k, v = self.kv_layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2).chunk(2, -1)
        q = self.q_layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return self.linear_layer(attend(q, k, v, keep))


class FeedForward(nn.Module):
    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.linear1, self.linear2 = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear2(self.linear1(x).relu())


class Layer(nn.Module):
    def __init__(self, d_model: int, heads: int, d_ff: int, *, cross: bool) -> None:
        super().__init__()
        self.mlh = FusedAttention(d_model, heads)
        self.cmlh = FusedCrossAttention(d_model, heads) if cross else None
        self.layer_norm_first, self.layer_norm_second = LayerNormalization(d_model), LayerNormalization(d_model)
        if cross:
            self.layer_norm_third = LayerNormalization(d_model)
        self.ffn = FeedForward(d_model, d_ff)

    def forward(self, y: Tensor, keep: Tensor, x: Tensor | None = None, source: Tensor | None = None) -> Tensor:
        y = self.layer_norm_first(y + self.mlh(y, keep))
        if self.cmlh is None:
            return self.layer_norm_second(y + self.ffn(y))
        y = self.layer_norm_second(y + self.cmlh(x, y, source))
        return self.layer_norm_third(y + self.ffn(y))


class Stack(nn.Module):
    def __init__(self, layers: list[Layer]) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)


class Notebook000(nn.Module):
    """A post-norm encoder-decoder with fused projections."""

    def __init__(self, vocab: int = 31, d_model: int = 32, heads: int = 4, d_ff: int = 48, layers: int = 2) -> None:
        super().__init__()
        self.encoder = Stack([Layer(d_model, heads, d_ff, cross=False) for _ in range(layers)])
        self.decoder = Stack([Layer(d_model, heads, d_ff, cross=True) for _ in range(layers)])
        self.src_embed, self.tgt_embed = nn.Embedding(vocab, d_model), nn.Embedding(vocab, d_model)
        self.pos_encoding = nn.Module()
        self.pos_encoding.register_buffer("pe", positions(24, d_model)[None])
        self.generator = nn.Linear(d_model, vocab)

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        x, y = (
            embed(ids) * math.sqrt(embed.embedding_dim) + self.pos_encoding.pe[:, : ids.shape[1]]
            for embed, ids in ((self.src_embed, source), (self.tgt_embed, target))
        )
        mask = keep[:, None, None]
        for layer in self.encoder.layers:
            x = layer(x, mask)
        for layer in self.decoder.layers:
            y = layer(y, causal(target), x, mask)
        return self.generator(y)
