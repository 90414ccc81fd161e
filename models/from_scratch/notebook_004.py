"""Notebook 004, repaired and completed: post-norm, embeddings scaled by the root of d_model."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


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


class Attention(nn.Module):
    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.Q_linear_projection_layer, self.K_linear_projection_layer = (nn.Linear(d_model, d_model) for _ in "QK")
        self.V_linear_projection_layer, self.W_o = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)

    def forward(self, query: Tensor, memory: Tensor, keep: Tensor) -> Tensor:
        maps = (self.Q_linear_projection_layer, self.K_linear_projection_layer, self.V_linear_projection_layer)
        parts = (
            map_(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for map_, x in zip(maps, (query, memory, memory), strict=True)
        )
        return self.W_o(attend(*parts, keep))


class Layer(nn.Module):
    def __init__(self, d_model: int, heads: int, d_ff: int, *, cross: bool) -> None:
        super().__init__()
        self.MHA = Attention(d_model, heads)
        self.cross_MHA = Attention(d_model, heads) if cross else None
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        if cross:
            self.norm3 = nn.LayerNorm(d_model)
        self.linear1, self.linear2 = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)

    def forward(self, y: Tensor, keep: Tensor, x: Tensor | None = None, source: Tensor | None = None) -> Tensor:
        y = self.norm1(y + self.MHA(y, y, keep))
        if self.cross_MHA is None:
            return self.norm2(self.linear2(F.relu(self.linear1(y))) + y)
        y = self.norm2(y + self.cross_MHA(y, x, source))
        return self.norm3(self.linear2(F.relu(self.linear1(y))) + y)


class InputEmbedding(nn.Module):
    def __init__(self, vocab: int, d_model: int, length: int) -> None:
        super().__init__()
        self.embedding_layer = nn.Embedding(vocab, d_model)
        self.pos_encoder = nn.Module()
        self.pos_encoder.register_buffer("pos_enc", positions(length, d_model))

    def forward(self, ids: Tensor) -> Tensor:
        # The root is float32 whatever the type of the model is.
        root = torch.sqrt(torch.tensor(self.embedding_layer.embedding_dim))
        return self.embedding_layer(ids) * root + self.pos_encoder.pos_enc[: ids.shape[1]]


class Stack(nn.Module):
    def __init__(self, vocab: int, d_model: int, heads: int, d_ff: int, layers: int, *, cross: bool) -> None:
        super().__init__()
        self.input_embedding = InputEmbedding(vocab, d_model, 24)
        self.layers = nn.ModuleList(Layer(d_model, heads, d_ff, cross=cross) for _ in range(layers))


class Notebook004(nn.Module):
    """A post-norm encoder-decoder with one projection for each of query, key and value."""

    def __init__(self, vocab: int = 31, d_model: int = 30, heads: int = 6, d_ff: int = 48, layers: int = 2) -> None:
        super().__init__()
        self.encoder = Stack(vocab, d_model, heads, d_ff, layers, cross=False)
        self.decoder = Stack(vocab, d_model, heads, d_ff, layers, cross=True)
        self.generator = nn.Linear(d_model, vocab)

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        x, y, mask = self.encoder.input_embedding(source), self.decoder.input_embedding(target), keep[:, None, None]
        for layer in self.encoder.layers:
            x = layer(x, mask)
        for layer in self.decoder.layers:
            y = layer(y, causal(target), x, mask)
        return self.generator(y)
