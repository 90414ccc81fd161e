from __future__ import annotations

import torch
from torch import Tensor, nn

from models.from_scratch.pieces import HEADS, LENGTH, SOURCE, TARGET, D, causal, softmax_attention


class HeadLists(nn.Module):
    """Every head has its own linear maps, in a list."""

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key, self.value = (nn.Linear(D, D // HEADS) for _ in range(3))

    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList(HeadLists.Head() for _ in range(HEADS))
            self.proj = nn.Linear(D, D)

        def forward(self, x: Tensor, memory: Tensor, keep: Tensor) -> Tensor:
            found = [
                softmax_attention(
                    head.query(x)[:, None], head.key(memory)[:, None], head.value(memory)[:, None], keep, 6**-0.5
                )
                for head in self.heads
            ]
            return self.proj(torch.cat(found, -1)[:, 0])

    class Layer(nn.Module):
        def __init__(self, *, cross: bool) -> None:
            super().__init__()
            self.sa, self.ln1, self.ln2 = HeadLists.Attend(), nn.LayerNorm(D), nn.LayerNorm(D)
            self.net = nn.Sequential(nn.Linear(D, 60), nn.GELU(), nn.Linear(60, D))
            if cross:
                self.ca, self.ln3 = HeadLists.Attend(), nn.LayerNorm(D)

    def __init__(self) -> None:
        super().__init__()
        self.source_table, self.target_table = nn.Embedding(SOURCE, D), nn.Embedding(TARGET, D)
        self.source_pos, self.target_pos = nn.Embedding(LENGTH, D), nn.Embedding(LENGTH, D)
        self.encode_layers = nn.ModuleList(self.Layer(cross=False) for _ in range(2))
        self.decode_layers = nn.ModuleList(self.Layer(cross=True) for _ in range(2))
        self.head = nn.Linear(D, TARGET, bias=False)

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        keep = keep[:, None, None]
        memory = self.source_table(source) + self.source_pos.weight[: source.shape[1]]
        for layer in self.encode_layers:
            h = layer.ln1(memory)
            memory = memory + layer.sa(h, h, keep)
            memory = memory + layer.net(layer.ln2(memory))
        x = self.target_table(target) + self.target_pos.weight[: target.shape[1]]
        for layer in self.decode_layers:
            h = layer.ln1(x)
            x = x + layer.sa(h, h, causal(target))
            x = x + layer.ca(layer.ln2(x), memory, keep)
            x = x + layer.net(layer.ln3(x))
        return self.head(x)
