"""Pieces that several of these models share: attention, causal masks, a table of positions."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

SOURCE, TARGET, D, HEADS, LENGTH = 29, 31, 24, 4, 20


def causal(ids: Tensor) -> Tensor:
    return torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()[None, None]


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, scale: float) -> Tensor:
    """Attend; all of [batch, heads, len, d_k], keep broadcast to [batch, heads, len, len]."""
    return ((q @ k.transpose(-1, -2)) * scale).masked_fill(~keep, -1e9).softmax(-1) @ v


def split(x: Tensor, heads: int = HEADS) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def table(length: int, d: int) -> Tensor:
    angle = torch.arange(length)[:, None] * torch.exp(torch.arange(0, d, 2) * (-math.log(10000.0) / d))
    return torch.stack((angle.sin(), angle.cos()), -1).flatten(1)


class Attention(nn.Module):
    """Four linear maps under the given names, in the order of queries, keys, values and output."""

    def __init__(self, *names: str, bias: bool = True) -> None:
        super().__init__()
        self.names = names
        for name in names:
            self.add_module(name, nn.Linear(D, D, bias=bias))

    def forward(self, x: Tensor, memory: Tensor, keep: Tensor) -> Tensor:
        q, k, v, o = (getattr(self, name) for name in self.names)
        return o(merge(softmax_attention(split(q(x)), split(k(memory)), split(v(memory)), keep, (D // HEADS) ** -0.5)))


def parameters(module: nn.Module, **shapes: tuple[int, ...]) -> None:
    for name, shape in shapes.items():
        module.register_parameter(name, nn.Parameter(torch.randn(shape)))
