"""Notebooks 000, 002 and 004 in their repaired form, with the key names and the arithmetic of their authors.

001 and 003 have recorded outputs. What the authors left open (embeddings,
positions, output) has the names that the built-in layouts document.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tfexport.nn.positions import sinusoid_table


def attend(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """Attend over [batch, heads, len, width]; `keep` broadcasts to [batch, heads, len, len]."""
    scores = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(~keep, -1e9)
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def causal(ids: Tensor) -> Tensor:
    return torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()


class LayerNormalization(nn.Module):
    """Of 000: eps stands behind the division."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.ones(d_model)), nn.Parameter(torch.zeros(d_model))

    def forward(self, x: Tensor) -> Tensor:
        return self.gamma * ((x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True) + 1e-5) + self.beta


class FusedAttention(nn.Module):
    """Of 000: one projection, each head's queries, keys and values side by side."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv_layer, self.linear_layer = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        q, k, v = self.qkv_layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2).chunk(3, -1)
        return self.linear_layer(attend(q, k, v, keep))


class FusedCrossAttention(nn.Module):
    """Of 000: keys and values from one projection, queries from their own."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.kv_layer, self.q_layer = nn.Linear(d_model, 2 * d_model), nn.Linear(d_model, d_model)
        self.linear_layer = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor, y: Tensor, keep: Tensor) -> Tensor:
        k, v = self.kv_layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2).chunk(2, -1)
        q = self.q_layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return self.linear_layer(attend(q, k, v, keep))


class FeedForward000(nn.Module):
    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.linear1, self.linear2 = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear2(self.linear1(x).relu())


class Layer000(nn.Module):
    def __init__(self, d_model: int, heads: int, d_ff: int, *, cross: bool) -> None:
        super().__init__()
        self.mlh = FusedAttention(d_model, heads)
        self.cmlh = FusedCrossAttention(d_model, heads) if cross else None
        self.layer_norm_first, self.layer_norm_second = LayerNormalization(d_model), LayerNormalization(d_model)
        if cross:
            self.layer_norm_third = LayerNormalization(d_model)
        self.ffn = FeedForward000(d_model, d_ff)

    def forward(self, y: Tensor, keep: Tensor, x: Tensor | None = None, source: Tensor | None = None) -> Tensor:
        y = self.layer_norm_first(y + self.mlh(y, keep))
        if self.cmlh is None:
            return self.layer_norm_second(y + self.ffn(y))
        y = self.layer_norm_second(y + self.cmlh(x, y, source))
        return self.layer_norm_third(y + self.ffn(y))


class Stack000(nn.Module):
    def __init__(self, layers: list[Layer000]) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)


class Notebook000(nn.Module):
    """Post-norm, fused projections."""

    def __init__(self, vocab: int = 31, d_model: int = 32, heads: int = 4, d_ff: int = 48, layers: int = 2) -> None:
        super().__init__()
        self.encoder = Stack000([Layer000(d_model, heads, d_ff, cross=False) for _ in range(layers)])
        self.decoder = Stack000([Layer000(d_model, heads, d_ff, cross=True) for _ in range(layers)])
        self.src_embed, self.tgt_embed = nn.Embedding(vocab, d_model), nn.Embedding(vocab, d_model)
        self.pos_encoding = nn.Module()
        self.pos_encoding.register_buffer("pe", sinusoid_table(24, d_model)[None])
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


class Attention002(nn.Module):
    def __init__(self, d_k: int, d_model: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(d_model, d_k * heads) for _ in range(3))
        self.out = nn.Linear(d_k * heads, d_model)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        parts = (map_(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for map_ in (self.query, self.key, self.value))
        return self.out(attend(*parts, keep))


class Block002(nn.Module):
    """Has a norm that nothing uses."""

    def __init__(self, d_k: int, d_model: int, heads: int) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(d_model)
        self.attention = Attention002(d_k, d_model, heads)
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.ff = nn.Sequential(nn.Linear(d_model, 4 * d_model), nn.GELU(), nn.Linear(4 * d_model, d_model))

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        x = self.norm1(x + self.attention(x, keep))
        return self.norm2(x + self.ff(x))


class Notebook002(nn.Module):
    """An encoder alone, d_k free."""

    def __init__(self, vocab: int = 31, d_model: int = 32, d_k: int = 12, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, d_model)
        self.pos_encoding = nn.Module()
        self.pos_encoding.register_buffer("pe", sinusoid_table(24, d_model)[None])
        self.transformer_blocks = nn.Sequential(*(Block002(d_k, d_model, heads) for _ in range(layers)))

    def forward(self, source: Tensor, keep: Tensor) -> Tensor:
        x = self.embedding(source) + self.pos_encoding.pe[:, : source.shape[1]]
        for block in self.transformer_blocks:
            x = block(x, keep[:, None, None])
        return x


class Attention004(nn.Module):
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


class Layer004(nn.Module):
    def __init__(self, d_model: int, heads: int, d_ff: int, *, cross: bool) -> None:
        super().__init__()
        self.MHA = Attention004(d_model, heads)
        self.cross_MHA = Attention004(d_model, heads) if cross else None
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
        self.pos_encoder.register_buffer("pos_enc", sinusoid_table(length, d_model))

    def forward(self, ids: Tensor) -> Tensor:
        # The root is float32, whatever the model is.
        root = torch.sqrt(torch.tensor(self.embedding_layer.embedding_dim))
        return self.embedding_layer(ids) * root + self.pos_encoder.pos_enc[: ids.shape[1]]


class Stack004(nn.Module):
    def __init__(self, vocab: int, d_model: int, heads: int, d_ff: int, layers: int, *, cross: bool) -> None:
        super().__init__()
        self.input_embedding = InputEmbedding(vocab, d_model, 24)
        self.layers = nn.ModuleList(Layer004(d_model, heads, d_ff, cross=cross) for _ in range(layers))


class Notebook004(nn.Module):
    """Post-norm, one projection each."""

    def __init__(self, vocab: int = 31, d_model: int = 30, heads: int = 6, d_ff: int = 48, layers: int = 2) -> None:
        super().__init__()
        self.encoder = Stack004(vocab, d_model, heads, d_ff, layers, cross=False)
        self.decoder = Stack004(vocab, d_model, heads, d_ff, layers, cross=True)
        self.generator = nn.Linear(d_model, vocab)

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        x, y, mask = self.encoder.input_embedding(source), self.decoder.input_embedding(target), keep[:, None, None]
        for layer in self.encoder.layers:
            x = layer(x, mask)
        for layer in self.decoder.layers:
            y = layer(y, causal(target), x, mask)
        return self.generator(y)
