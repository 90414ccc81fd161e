"""What the rebuilt models share: a tree of named parts, attention, tables of positions.

Masks are bool, True = token. Targets are padded on the right, so that the causal
mask alone keeps padding from the tokens that count, whatever an original masks besides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

SOURCE, TARGET, D, HEADS, LAYERS, LENGTH = 19, 23, 16, 4, 2, 12


class Tree(nn.Module):
    """Modules, parameters and buffers by name, and no maths of its own."""

    def __init__(self, **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name)


def layers(make: Callable[[], nn.Module], count: int = LAYERS) -> Any:
    """A list of equal layers."""
    return nn.ModuleList(make() for _ in range(count))


def std_norm(x: Tensor, gain: Tensor, shift: Tensor, eps: float) -> Tensor:
    """Normalize with the unbiased standard deviation, to which eps is added."""
    return gain * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + eps) + shift


def causal(ids: Tensor) -> Tensor:
    """What each target position may see, [1, len, len]."""
    return torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()[None]


def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, *, heads: int = HEADS, scale: float | None = None) -> Tensor:
    """Attend; projections [batch, len, heads · width], `seen` broadcast to [batch, len, len]."""
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    scores = (q @ k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    return (scores.masked_fill(~seen[:, None], -1e9).softmax(-1) @ v).transpose(1, 2).flatten(2)


def waves(length: int = LENGTH, *, exponent: Callable[[Tensor], Tensor] = lambda column: column // 2 * 2) -> Tensor:
    """Sines at even and cosines at odd columns, float32 [length, D]; `exponent` is that of 10000, times D."""
    column = torch.arange(D, dtype=torch.float64)
    angle = torch.arange(length, dtype=torch.float64)[:, None] / 10000 ** (exponent(column) / D)
    return torch.where(column % 2 == 0, angle.sin(), angle.cos()).float()


def waves_by_column(length: int = LENGTH) -> Tensor:
    """The table of those who take the number of the column for that of the pair: no two wavelengths are equal."""
    return waves(length, exponent=lambda column: 2 * column)
