"""Notebook 003: post-norm with final norms, a free head size, the causal mask kept as a buffer."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


def positions(length: int, d_model: int) -> Tensor:
    """Sines at even and cosines at odd columns, float32 [length, d_model]."""
    angle = torch.arange(length)[:, None] * torch.exp(torch.arange(0, d_model, 2) * (-math.log(10000.0) / d_model))
    return torch.stack((angle.sin(), angle.cos()), -1).flatten(1)


class MultiHeadAttention(nn.Module):
    def __init__(self, d_k: int, d_model: int, heads: int, length: int, *, is_causal: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(d_model, d_k * heads) for _ in range(3))
        self.out = nn.Linear(d_k * heads, d_model)
        if is_causal:
            self.register_buffer("causal_mask", torch.ones(length, length).tril()[None, None])
        self.is_causal = is_causal

    def forward(self, query: Tensor, memory: Tensor, keep: Tensor | None) -> Tensor:
        q, k, v = (
            linear(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for linear, x in ((self.query, query), (self.key, memory), (self.value, memory))
        )
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        if keep is not None:
            scores = scores.masked_fill(~keep[:, None, None], float("-inf"))
        if self.is_causal:
            mask = self.causal_mask[:, :, : q.shape[2], : k.shape[2]]
            scores = scores.masked_fill(mask == 0, float("-inf"))
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def feed_forward(d_model: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(d_model, 4 * d_model), nn.GELU(), nn.Linear(4 * d_model, d_model))


class EncoderBlock(nn.Module):
    def __init__(self, d_k: int, d_model: int, heads: int, length: int) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(d_k, d_model, heads, length)
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.ff = feed_forward(d_model)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        x = self.norm1(x + self.attention(x, x, keep))
        return self.norm2(x + self.ff(x))


class DecoderBlock(nn.Module):
    def __init__(self, d_k: int, d_model: int, heads: int, length: int) -> None:
        super().__init__()
        self.attention_1 = MultiHeadAttention(d_k, d_model, heads, length, is_causal=True)
        self.attention_2 = MultiHeadAttention(d_k, d_model, heads, length)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(d_model) for _ in range(3))
        self.ff = feed_forward(d_model)

    def forward(self, x: Tensor, memory: Tensor, keep: Tensor) -> Tensor:
        x = self.norm1(x + self.attention_1(x, x, None))
        x = self.norm2(x + self.attention_2(x, memory, keep))
        return self.norm3(x + self.ff(x))


class PositionalEncoding(nn.Module):
    def __init__(self, length: int, d_model: int) -> None:
        super().__init__()
        self.register_buffer("pe", positions(length, d_model)[None])

    def forward(self, x: Tensor) -> Tensor:
        return x + self.pe[:, : x.shape[1]]


class Stack(nn.Module):
    def __init__(self, blocks: list[nn.Module], vocab: int, d_model: int, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, d_model)
        self.pos_encoding = PositionalEncoding(length, d_model)
        self.transformer_blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(d_model)

    def forward(self, ids: Tensor, *others: Tensor) -> Tensor:
        x = self.pos_encoding(self.embedding(ids))
        for block in self.transformer_blocks:
            x = block(x, *others)
        return self.norm(x)


class Notebook003(nn.Module):
    """A post-norm encoder-decoder with final norms."""

    def __init__(
        self, source: int = 37, target: int = 41, d_k: int = 12, d_model: int = 32, heads: int = 4, length: int = 24
    ) -> None:
        super().__init__()
        sizes = (d_k, d_model, heads, length)
        self.encoder = Stack([EncoderBlock(*sizes) for _ in range(2)], source, d_model, length)
        self.decoder = Stack([DecoderBlock(*sizes) for _ in range(2)], target, d_model, length)
        self.decoder.out = nn.Linear(d_model, target)

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        return self.decoder.out(self.decoder(target, self.encoder(source, keep), keep))
