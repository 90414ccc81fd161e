"""Scaled dot-product attention with boolean keep masks ("Attention is all you need", §3.2.1)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

# Finite, so that a row with nothing to attend to is not NaN, and inside the range of float16.
MASK_FILL = -1e4


def dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    bias: Tensor | None = None,
    *,
    scale: float,
    dropout: float = 0.0,
) -> Tensor:
    """Compute softmax(QKᵀ · scale + bias) V with the softmax in float32 or wider.

    Args:
        query: [rows, heads, target_len, head_dim].
        key: [rows, heads, len, head_dim].
        value: [rows, heads, len, value_dim].
        mask: bool, True = attend, broadcast to [rows, heads, target_len, len].
        bias: added to the scores, broadcast likewise.
        scale: factor on the scores.
        dropout: probability of dropping a weight.

    Returns:
        [rows, heads, target_len, value_dim].
    """
    weights = attention_weights(query, key, mask, bias, scale=scale)
    weights = F.dropout(weights, dropout, training=dropout > 0)
    return weights.to(value.dtype) @ value


def attention_weights(query: Tensor, key: Tensor, mask: Tensor, bias: Tensor | None = None, *, scale: float) -> Tensor:
    """Compute softmax(QKᵀ · scale + bias), as `dot_product_attention` does.

    Returns:
        float32 or wider, [rows, heads, target_len, len].
    """
    scores = (query * scale) @ key.transpose(-1, -2)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if bias is not None:
        scores = scores + bias
    return torch.softmax(torch.where(mask, scores, MASK_FILL), -1)
