from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from models.from_scratch.pieces import HEADS, LENGTH, SOURCE, TARGET, D, causal, merge, softmax_attention, split


class SmallProjections(nn.Module):
    """One projection for all heads; the scale is that of the whole width; the decoder holds an encoder block."""

    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            width = D // HEADS
            self.values, self.keys, self.queries = (nn.Linear(width, width, bias=False) for _ in range(3))
            self.fc_out = nn.Linear(D, D)

        def forward(self, q: Tensor, memory: Tensor, keep: Tensor) -> Tensor:
            queries, keys, values = self.queries(split(q)), self.keys(split(memory)), self.values(split(memory))
            return self.fc_out(merge(softmax_attention(queries, keys, values, keep, D**-0.5)))

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = SmallProjections.Attend()
            self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
            self.feed_forward = nn.Sequential(nn.Linear(D, 3 * D), nn.ReLU(), nn.Linear(3 * D, D))

        def forward(self, q: Tensor, memory: Tensor, keep: Tensor) -> Tensor:
            x = self.norm1(self.attention(q, memory, keep) + q)
            return self.norm2(self.feed_forward(x) + x)

    class DecoderBlock(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.attention = nn.LayerNorm(D), SmallProjections.Attend()
            self.transformer_block = SmallProjections.Block()

    class Side(nn.Module):
        def __init__(self, vocab: int, block: Any) -> None:
            super().__init__()
            self.word_embedding, self.position_embedding = nn.Embedding(vocab, D), nn.Embedding(LENGTH, D)
            self.layers = nn.ModuleList(block() for _ in range(2))

        def embed(self, ids: Tensor) -> Tensor:
            return self.word_embedding(ids) + self.position_embedding(torch.arange(ids.shape[1]))

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = self.Side(SOURCE, self.Block), self.Side(TARGET, self.DecoderBlock)
        self.decoder.fc_out = nn.Linear(D, TARGET)

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        keep = keep[:, None, None]
        memory = self.encoder.embed(source)
        for layer in self.encoder.layers:
            memory = layer(memory, memory, keep)
        x = self.decoder.embed(target)
        for layer in self.decoder.layers:
            x = layer.transformer_block(layer.norm(layer.attention(x, x, causal(target)) + x), memory, keep)
        return self.decoder.fc_out(x)
