"""Scaled dot-product attention ("Attention is all you need", §3.2.1) with masks.

If there are fewer key heads than query heads, adjacent query heads share a key head (arXiv:2305.13245), which is
repeated for them. TensorRT fuses attention with repeated keys, but not attention with regrouped queries.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

# Finite, so that a fully masked row is not NaN, and within the range of float16.
MASK_FILL = -1e4


def dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    bias: Tensor | None = None,
    *,
    scale: float,
    softcap: float = 0.0,
    dropout: float = 0.0,
) -> Tensor:
    """Compute softmax(QKᵀ · scale + bias) V, with the softmax in float32 or wider.

    Args:
        query: [rows, heads, target_len, head_dim].
        key: [rows, kv_heads, len, head_dim]; kv_heads divides heads.
        value: [rows, kv_heads, len, value_dim].
        mask: bool, True = attend, broadcast to [rows, heads, target_len, len].
        bias: added to the scores, broadcast in the same way.
        scale: factor on the scores.
        softcap: limit of the scores: softcap · tanh(scores / softcap), before the bias; 0 for no limit.
        dropout: probability of dropping a weight.

    Returns:
        [rows, heads, target_len, value_dim].
    """
    weights = attention_weights(query, key, mask, bias, scale=scale, softcap=softcap)
    weights = F.dropout(weights, dropout, training=dropout > 0)
    return weights.to(value.dtype) @ _repeated(value, query.shape[1])


def attention_weights(
    query: Tensor, key: Tensor, mask: Tensor, bias: Tensor | None = None, *, scale: float, softcap: float = 0.0
) -> Tensor:
    """Compute softmax(QKᵀ · scale + bias), as `dot_product_attention` does.

    Returns:
        float32 or wider, [rows, heads, target_len, len].
    """
    scores = (query * scale) @ _repeated(key, query.shape[1]).transpose(-1, -2)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    return torch.softmax(torch.where(mask, scores, MASK_FILL), -1)


def _repeated(x: Tensor, heads: int) -> Tensor:
    if x.shape[1] == heads:
        return x
    return x.unsqueeze(2).expand(-1, -1, heads // x.shape[1], -1, -1).flatten(1, 2)
