"""The static variant: fixed-size buffers, and one ONNX `Attention` per attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from tfexport.contract import STATIC_OPSET
from tfexport.export.decoders._variant import DecoderVariant, TracedCache
from tfexport.nn.cache import MASK_FILL, Cross, KeyValue, dot_product_attention, merge_rows, split_rows


class StaticCache(TracedCache):
    """Buffers of fixed capacity, written in place at each row's own position.

    The same as `tfexport.nn.cache.RowCache`, but only in a trace: `TensorScatter` has no PyTorch equivalent.
    """

    def __init__(self, past: Sequence[KeyValue], target_ids: Tensor, cache_lengths: Tensor) -> None:
        """Begin a step: `past` [rows, kv_heads, capacity, …] has `cache_lengths` tokens."""
        self.past, self._cache_lengths = past, cache_lengths
        self.present = []
        positions = cache_lengths[:, None] + torch.arange(target_ids.shape[1])
        self._begin(target_ids.shape[0], positions, past[0].key.shape[2])

    def update(self, layer: int, new: KeyValue) -> KeyValue:
        """Write new keys and values [rows, kv_heads, target_len, …]; return the buffers."""
        past = self.past[layer]
        self.present.append(KeyValue(self._scatter(past.key, new.key), self._scatter(past.value, new.value)))
        return self.present[-1]

    def _scatter(self, buffer: Tensor, new: Tensor) -> Tensor:
        return torch.onnx.ops.symbolic(
            "TensorScatter",
            (buffer, new, self._cache_lengths),
            {"axis": 2, "mode": "linear"},
            dtype=buffer.dtype,
            shape=buffer.shape,
            version=STATIC_OPSET,
        )

    def _context(self, query: Tensor, stored: KeyValue, bias: Tensor | None, scale: float, softcap: float) -> Tensor:
        return _attention(query, stored, self.mask, bias, scale, softcap)


class StaticCross(Cross):
    """Cross-attention in one `Attention` per layer."""

    def attend(self, layer: int, query: Tensor, *, scale: float, softcap: float = 0.0) -> Tensor:
        """Attend to the source; see `Cross`."""
        query, mask = split_rows(query, self.mask.shape[0]), self.mask[:, None, None, :]
        return merge_rows(_attention(query, self.key_values[layer], mask, None, scale, softcap))


def _attention(
    query: Tensor, stored: KeyValue, mask: Tensor, bias: Tensor | None, scale: float, softcap: float
) -> Tensor:
    """Compute `dot_product_attention` in one operator, which becomes ONNX `Attention`.

    The mask is expanded, because some runtimes misread a broadcast mask. It is added, because TensorRT-RTX fails on a
    bool mask if 8 does not divide head_dim. Runtimes disagree whether the operator's `softcap` comes before the mask.
    """
    if softcap:
        return dot_product_attention(query, stored.key, stored.value, mask, bias, scale=scale, softcap=softcap)
    mask = torch.where(mask, 0.0 if bias is None else bias, MASK_FILL).to(query.dtype)
    mask = mask.expand(query.shape[0], -1, query.shape[2], stored.key.shape[2])
    is_grouped = query.shape[1] != stored.key.shape[1]
    return F.scaled_dot_product_attention(
        query, stored.key, stored.value, attn_mask=mask, scale=scale, enable_gqa=is_grouped
    )


STATIC = DecoderVariant(cache=StaticCache, cross=StaticCross, opset=STATIC_OPSET)
