"""Notebook 001, repaired: pre-norm, norms with one gain and one bias each, log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Callable

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
    """Unbiased standard deviation, one gain and one bias for all columns."""

    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.alpha, self.bias = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.alpha * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + self.eps) + self.bias


class InputEmbeddings(nn.Module):
    def __init__(self, vocab: int, d_model: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, d_model)

    def forward(self, ids: Tensor) -> Tensor:
        return self.embedding(ids) * math.sqrt(self.embedding.embedding_dim)


class PositionalEncoding(nn.Module):
    def __init__(self, length: int, d_model: int) -> None:
        super().__init__()
        self.register_buffer("pe", positions(length, d_model)[None])

    def forward(self, x: Tensor) -> Tensor:
        return x + self.pe[:, : x.shape[1]]


class MultiHeadAttentionBlock(nn.Module):
    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.w_q, self.w_k, self.w_v, self.w_o = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, query: Tensor, memory: Tensor, keep: Tensor) -> Tensor:
        q, k, v = (
            linear(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for linear, x in ((self.w_q, query), (self.w_k, memory), (self.w_v, memory))
        )
        return self.w_o(attend(q, k, v, keep))


class FeedForwardBlock(nn.Module):
    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.linear_1, self.linear_2 = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_2(torch.relu(self.linear_1(x)))


class ResidualConnection(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = LayerNormalization()

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        return x + sublayer(self.norm(x))


class Block(nn.Module):
    def __init__(self, d_model: int, heads: int, d_ff: int, *, cross: bool) -> None:
        super().__init__()
        self.self_attention_block = MultiHeadAttentionBlock(d_model, heads)
        self.cross_attention_block = MultiHeadAttentionBlock(d_model, heads) if cross else None
        self.feed_forward_block = FeedForwardBlock(d_model, d_ff)
        self.residual_connections = nn.ModuleList(ResidualConnection() for _ in range(3 if cross else 2))

    def forward(self, x: Tensor, keep: Tensor, memory: Tensor | None = None, source: Tensor | None = None) -> Tensor:
        x = self.residual_connections[0](x, lambda h: self.self_attention_block(h, h, keep))
        if self.cross_attention_block is not None:
            x = self.residual_connections[1](x, lambda h: self.cross_attention_block(h, memory, source))
        return self.residual_connections[-1](x, self.feed_forward_block)


class Stack(nn.Module):
    def __init__(self, layers: list[Block]) -> None:
        super().__init__()
        self.layers, self.norm = nn.ModuleList(layers), LayerNormalization()

    def forward(self, x: Tensor, *masks: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, *masks)
        return self.norm(x)


class ProjectionLayer(nn.Module):
    def __init__(self, d_model: int, vocab: int) -> None:
        super().__init__()
        self.proj = nn.Linear(d_model, vocab)

    def forward(self, x: Tensor) -> Tensor:
        return torch.log_softmax(self.proj(x), -1)


class Notebook001(nn.Module):
    """A pre-norm encoder-decoder that returns log-probabilities."""

    def __init__(
        self, source: int = 37, target: int = 41, d_model: int = 32, heads: int = 4, d_ff: int = 64, layers: int = 2
    ) -> None:
        super().__init__()
        self.encoder = Stack([Block(d_model, heads, d_ff, cross=False) for _ in range(layers)])
        self.decoder = Stack([Block(d_model, heads, d_ff, cross=True) for _ in range(layers)])
        self.src_embed, self.tgt_embed = InputEmbeddings(source, d_model), InputEmbeddings(target, d_model)
        self.src_pos, self.tgt_pos = PositionalEncoding(24, d_model), PositionalEncoding(24, d_model)
        self.projection_layer = ProjectionLayer(d_model, target)

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        mask = keep[:, None, None]
        memory = self.encoder(self.src_pos(self.src_embed(source)), mask)
        return self.projection_layer(self.decoder(self.tgt_pos(self.tgt_embed(target)), causal(target), memory, mask))
