"""The static variant: fixed-size buffers, and one ONNX `Attention` per attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from tfexport.contract import STATIC_OPSET
from tfexport.export.decoders._form import DecoderForm
from tfexport.nn.cache import KeyValue, merge_rows, split_rows
from tfexport.nn.dot_product import MASK_FILL, dot_product_attention


class StaticCache:
    """Buffers of fixed capacity, written in place at each row's own position.

    `TensorScatter` (ONNX opset 24) has no PyTorch equivalent, so this cache works only in a trace.
    `tfexport.nn.cache.RowCache` is the same in PyTorch.

    Attributes:
        past: one `KeyValue` per layer, [rows, kv_heads, capacity, …].
        present: filled by `attend`, of the same shapes.
        positions: int64 [rows, target_len].
        key_len: the capacity.
        mask: the causal mask over the whole buffer, bool [rows, 1, target_len, capacity].
    """

    def __init__(self, past: Sequence[KeyValue], target_ids: Tensor, cache_lengths: Tensor) -> None:
        """Begin a step of `target_ids` [rows, target_len].

        `cache_lengths`, int64 [rows], is the number of tokens in each row's buffers.
        """
        self.past, self._cache_lengths, self._rows = past, cache_lengths, target_ids.shape[0]
        self.present: list[KeyValue] = []
        self.key_len = past[0].key.shape[2]
        self.positions = cache_lengths[:, None] + torch.arange(target_ids.shape[1])
        self.mask = torch.arange(self.key_len) <= self.positions[:, None, :, None]

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None = None,
        *,
        scale: float,
        softcap: float = 0.0,
    ) -> Tensor:
        """Write keys and values into the buffers and attend; see `SelfAttention`."""
        query, key, value = (split_rows(part, self._rows) for part in (query, key, value))
        kept = self.update(layer, KeyValue(key, value))
        return _attention(query, kept, self.mask, bias, scale, softcap)

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


class StaticCross:
    """Cross-attention in one `Attention` per layer."""

    def __init__(self, key_values: Sequence[KeyValue], mask: Tensor) -> None:
        """Create it from each layer's keys and values and a bool mask [batch, source_len]."""
        self.key_values, self.mask = key_values, mask

    def attend(self, layer: int, query: Tensor, *, scale: float, softcap: float = 0.0) -> Tensor:
        """Attend to the source; see `Cross`."""
        kept = self.key_values[layer]
        query, mask = split_rows(query, self.mask.shape[0]), self.mask[:, None, None, :]
        return _attention(query, kept, mask, None, scale, softcap)


def _attention(
    query: Tensor, kept: KeyValue, mask: Tensor, bias: Tensor | None, scale: float, softcap: float
) -> Tensor:
    """Compute `dot_product_attention` in one operator, which becomes ONNX `Attention`.

    The mask is expanded to every query, because some runtimes reject or misread a broadcast mask. It is added to the
    scores, because TensorRT-RTX fails on a bool mask if 8 does not divide head_dim. A soft cap is written in basic
    operators, because runtimes disagree whether the operator's `softcap` comes before or after the mask.
    """
    if softcap:
        return merge_rows(dot_product_attention(query, kept.key, kept.value, mask, bias, scale=scale, softcap=softcap))
    mask = torch.where(mask, 0.0 if bias is None else bias, MASK_FILL).to(query.dtype)
    mask = mask.expand(query.shape[0], -1, query.shape[2], kept.key.shape[2])
    is_grouped = query.shape[1] != kept.key.shape[1]
    return merge_rows(
        F.scaled_dot_product_attention(query, kept.key, kept.value, attn_mask=mask, scale=scale, enable_gqa=is_grouped)
    )


STATIC = DecoderForm(cache=StaticCache, cross=StaticCross, opset=STATIC_OPSET)
