"""A cache whose rows stand at different positions: what the static form of the decoder graph does, in PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tfexport.nn.cache import KeyValue, merge_rows, split_rows
from tfexport.nn.dot_product import dot_product_attention


class RowCache:
    """Buffers of fixed capacity, written in place at each row's own position.

    Attributes:
        buffers: one `KeyValue` a layer, [rows, kv_heads, capacity, …]. What lies behind a row's tokens gets the
            weight 0 and may be anything finite; fill new buffers with 0, for 0 · NaN is NaN.
        positions: of the new tokens, int64 [rows, target_len].
        key_len: tokens of the longest row after the pass; what lies behind is not read.
        mask: the causal mask of every row, bool [rows, 1, target_len, key_len].
    """

    def __init__(self, buffers: Sequence[KeyValue], target_ids: Tensor, lengths: Tensor) -> None:
        """Begin a pass.

        Args:
            buffers: of every layer; changed in place.
            target_ids: the new tokens, int64 [rows, target_len].
            lengths: tokens in each row's cache, int64 [rows]; lengths + target_len is at most the capacity.
        """
        self.buffers = buffers
        self.positions = lengths[:, None] + torch.arange(target_ids.shape[1], device=lengths.device)
        self.key_len = int(self.positions.max()) + 1
        self.mask = torch.arange(self.key_len, device=lengths.device) <= self.positions[:, None, :, None]
        self._rows = torch.arange(len(lengths), device=lengths.device)[:, None]

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
        """Write the new tokens of `layer` and attend; see `SelfAttention.attend`."""
        rows = len(self._rows)
        kept = self.update(layer, KeyValue(split_rows(key, rows), split_rows(value, rows)))
        query = split_rows(query, rows)
        return merge_rows(
            dot_product_attention(query, kept.key, kept.value, self.mask, bias, scale=scale, softcap=softcap)
        )

    def update(self, layer: int, new: KeyValue) -> KeyValue:
        """Write new keys and values [rows, kv_heads, target_len, …] into the buffers; return views, key_len long."""
        buffer = self.buffers[layer]
        for kept, added in ((buffer.key, new.key), (buffer.value, new.value)):
            kept[self._rows, :, self.positions] = added.transpose(1, 2)
        return KeyValue(buffer.key[:, :, : self.key_len], buffer.value[:, :, : self.key_len])
