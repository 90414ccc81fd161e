"""Norms and feed-forward network of a block."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tfexport.nn.config import ConvolutionActivation, Side, TransformerConfig
from tfexport.nn.switches import Activation

ACTIVATIONS: dict[ConvolutionActivation, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "tanh": torch.tanh,
    "glu": lambda x: F.glu(x, 1),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
}


class LayerNorm(nn.Module):
    """One of three norms over the last axis, with statistics in float32 or wider.

    layernorm: (x - mean) / sqrt(biased variance + eps).
    std: (x - mean) / (unbiased standard deviation + eps).
    rms: x / sqrt(mean of squares + eps), no bias.
    """

    def __init__(self, config: TransformerConfig, side: Side, width: int | None = None) -> None:
        super().__init__()
        width = width or config.width(side)
        self.kind, self.eps = config.norm, float(config.value(side, "norm_eps"))
        self.weight = nn.Parameter(torch.ones(width))
        has_bias = config.norm_bias and config.norm != "rms"
        self.bias = nn.Parameter(torch.zeros(width)) if has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Normalize `x` [tokens, …, width]."""
        if self.kind == "layernorm":
            return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        if self.kind == "std":
            centered = wide - wide.mean(-1, keepdim=True)
            variance = centered.square().sum(-1, keepdim=True) / (x.shape[-1] - 1)
            scaled = centered / (variance.sqrt() + self.eps)
        else:
            scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        y = scaled.to(x.dtype) * self.weight
        return y if self.bias is None else y + self.bias


class FeedForward(nn.Module):
    """Two linear maps around an activation, which "glu" multiplies by a third map."""

    def __init__(self, config: TransformerConfig, side: Side) -> None:
        super().__init__()
        d_model, d_ff, bias = config.width(side), config.stack(side).d_ff, config.feed_forward_bias
        self.kind: Activation = config.value(side, "activation")
        self.dropout = nn.Dropout(config.dropout)
        self.fc1 = nn.Linear(d_model, d_ff, bias=bias)
        self.fc2 = nn.Linear(d_ff, d_model, bias=bias)
        self.gate = nn.Linear(d_model, d_ff, bias=bias) if config.value(side, "feed_forward") == "glu" else None

    def forward(self, x: Tensor) -> Tensor:
        """Map `x` [tokens, d_model] to the same shape."""
        hidden = ACTIVATIONS[self.kind](self.fc1(x))
        if self.gate is not None:
            hidden = hidden * self.gate(x)
        return self.fc2(self.dropout(hidden))  # type: ignore[no-any-return]
