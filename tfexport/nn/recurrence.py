"""Recurrent layers, which a decoder can have instead of self-attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tfexport.nn.cache import StateCache
from tfexport.nn.config import TransformerConfig
from tfexport.nn.layers import FeedForward
from tfexport.nn.positions import Rotation


class SSRU(nn.Module):
    """The simpler simple recurrent unit, which remembers earlier tokens in a state.

    See "From research to production and back", §3.1 (https://aclanthology.org/D19-5632). Tokens share one axis,
    [rows · len, d_model].
    """

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.forget = nn.Linear(d_model, d_model)
        self.update = nn.Linear(d_model, d_model, bias=False)

    def forward(
        self, x: Tensor, cache: StateCache, layer: int, bias: Tensor | None = None, rotation: Rotation | None = None
    ) -> Tensor:
        """Read tokens `x` [rows · len, d_model]; it has neither a bias nor positions."""
        forget = torch.sigmoid(self.forget(x))
        return F.relu(cache.recur(layer, forget, (1 - forget) * self.update(x)))


class AverageAttention(nn.Module):
    """The mean of all tokens so far, a feed-forward network and two gates.

    See "Accelerating neural transformer via an average attention network" (arXiv:1805.00631). Tokens share one axis,
    [rows · len, d_model].
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        d_model = config.width("decoder")
        self.ffn = FeedForward(config, "decoder")
        self.input = nn.Linear(d_model, d_model)
        self.forget = nn.Linear(d_model, d_model)

    def forward(
        self, x: Tensor, cache: StateCache, layer: int, bias: Tensor | None = None, rotation: Rotation | None = None
    ) -> Tensor:
        """Read tokens `x` [rows · len, d_model]; it has neither a bias nor positions."""
        read: Tensor = self.ffn(cache.average(layer, x))
        return torch.sigmoid(self.input(x)) * x + torch.sigmoid(self.forget(read)) * read


def recurrent_layer(config: TransformerConfig) -> SSRU | AverageAttention:
    """Return the layer of a decoder whose mixer is not attention."""
    mixer = config.stack("decoder").mixer
    return AverageAttention(config) if mixer == "average" else SSRU(config.width("decoder"))
