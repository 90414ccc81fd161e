"""Multi-head attention with boolean keep masks."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tfexport.models.cache import KeyValue

# Finite, so that a row with nothing to attend to is not NaN, and inside the range of float16.
MASK_FILL = -1e4


def attend(
    query: Tensor,
    memory: KeyValue,
    mask: Tensor,
    bias: Tensor | None,
    *,
    scale: float,
    dropout: float = 0.0,
) -> Tensor:
    """Compute softmax(QKᵀ · scale + bias) V with the softmax in float32 or wider.

    Args:
        query: [rows, heads, target_len, head_dim].
        memory: key [rows, heads, len, head_dim], value [rows, heads, len, value_dim].
        mask: bool, True = attend, broadcast to [rows, heads, target_len, len].
        bias: added to the scores, broadcast likewise.
        scale: factor on the scores.
        dropout: probability of dropping a weight.

    Returns:
        [rows, heads, target_len, value_dim].
    """
    scores = (query * scale) @ memory.key.transpose(-1, -2)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if bias is not None:
        scores = scores + bias
    weights = torch.softmax(torch.where(mask, scores, MASK_FILL), -1)
    weights = F.dropout(weights, dropout, training=dropout > 0)
    return weights.to(memory.value.dtype) @ memory.value


class MultiHeadAttention(nn.Module):
    """Attention in heads ("Attention is all you need", §3.2.2).

    Tokens lie in one axis, [rows · len, d_model]: every projection is one
    matrix product. Memory may have fewer rows than queries; the beams that
    share a row of memory then lie side by side as its query positions.
    """

    def __init__(
        self, d_model: int, num_heads: int, d_k: int, d_v: int, *, scale: float | None, bias: bool, dropout: float
    ) -> None:
        """Create the four projections; `scale` None means 1/sqrt(d_k)."""
        super().__init__()
        self.num_heads = num_heads
        self.scale = 1 / math.sqrt(d_k) if scale is None else scale
        self.dropout = dropout
        self.q = nn.Linear(d_model, num_heads * d_k, bias=bias)
        self.k = nn.Linear(d_model, num_heads * d_k, bias=bias)
        self.v = nn.Linear(d_model, num_heads * d_v, bias=bias)
        self.o = nn.Linear(num_heads * d_v, d_model, bias=bias)

    def key_value(self, x: Tensor, rows: int) -> KeyValue:
        """Project `x` [rows · len, d_model] to keys and values [rows, heads, len, …]."""
        return KeyValue(self._split(self.k(x), rows), self._split(self.v(x), rows))

    def forward(self, x: Tensor, memory: KeyValue, mask: Tensor, bias: Tensor | None = None) -> Tensor:
        """Attend from `x` to `memory`.

        Args:
            x: [rows · target_len, d_model]; rows is a multiple of batch.
            memory: key [batch, heads, len, d_k], value [batch, heads, len, d_v].
            mask: bool, True = attend, [batch or 1, 1, target_len or 1, len].
            bias: added to the scores, [batch or 1, heads, target_len, len].

        Returns:
            [rows · target_len, d_model].
        """
        query = self._split(self.q(x), memory.key.shape[0])
        dropout = self.dropout if self.training else 0.0
        context = attend(query, memory, mask, bias, scale=self.scale, dropout=dropout)
        return self.o(context.transpose(1, 2).reshape(x.shape[0], -1))  # type: ignore[no-any-return]

    def _split(self, x: Tensor, rows: int) -> Tensor:
        return x.reshape(rows, -1, self.num_heads, x.shape[1] // self.num_heads).transpose(1, 2)
