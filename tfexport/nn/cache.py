"""Interfaces of attention, and the two caches of the decoder in PyTorch.

A layer projects and calls `attend`; the object that it calls decides how keys and values are stored. `source.py` and
the decoder variants in `tfexport.export.decoders` implement the interfaces too. New tokens share one axis, [rows ·
target_len, heads, head_dim]; stored keys and values have the heads first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tfexport.nn.dot_product import dot_product_attention


@dataclass(frozen=True)
class KeyValue:
    """Keys and values of one attention.

    Attributes:
        key: [rows, kv_heads, len, head_dim].
        value: [rows, kv_heads, len, value_dim].
    """

    key: Tensor
    value: Tensor


class SelfAttention(Protocol):
    """Self-attention of all layers."""

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
        """Store a layer's new keys and values, and attend to all tokens that are visible.

        Args:
            layer: from 0; called once for each layer, in order.
            query: of the new tokens, [rows · len, heads, head_dim].
            key: [rows · len, kv_heads, head_dim]; kv_heads divides heads.
            value: [rows · len, kv_heads, value_dim].
            bias: added to the scores, [rows or 1, heads, len, keys].
            scale: factor on the scores.
            softcap: limit of the scores, see `dot_product_attention`; 0 for no limit.

        Returns:
            The context of every new token, with its heads concatenated, [rows · len, heads · value_dim].
        """
        ...


class Source(SelfAttention, Protocol):
    """Self-attention of an encoder: all source tokens at once, without padding.

    Attributes:
        mask: bool [batch, source_len], True = token.
    """

    mask: Tensor


class Cross(Protocol):
    """Cross-attention of a decoder to the keys and values of the source."""

    def attend(self, layer: int, query: Tensor, *, scale: float, softcap: float = 0.0) -> Tensor:
        """Attend from new target tokens to the source.

        Args:
            layer: from 0.
            query: [rows · target_len, heads, head_dim]; rows is a multiple of the number of sources, and the rows of
                one source are adjacent.
            scale: factor on the scores.
            softcap: limit of the scores, see `dot_product_attention`; 0 for no limit.

        Returns:
            The context of every token, with its heads concatenated, [rows · target_len, heads · value_dim].
        """
        ...


class Cache(SelfAttention, Protocol):
    """Self-attention of a decoder: past tokens and the new tokens of one pass.

    Attributes:
        positions: of every new token, int64 [rows or 1, target_len].
        key_len: number of keys, at positions 0, 1, …, that a bias has to cover.
    """

    positions: Tensor
    key_len: int


class ConcatCache:
    """A cache that concatenates the past and the new tokens.

    Attributes:
        past: one `KeyValue` per layer of length past_len, which may be 0.
        present: filled by `attend`, length past_len + target_len.
        positions: past_len, past_len + 1, …, int64 [1, target_len].
        key_len: past_len + target_len.
        mask: the causal mask, bool [1, 1, target_len, key_len].
    """

    def __init__(self, past: Sequence[KeyValue], target_ids: Tensor, *, dropout: float = 0.0) -> None:
        """Begin a pass.

        Args:
            past: of every layer; not changed.
            target_ids: the new tokens, int64 [rows, target_len].
            dropout: probability of dropping an attention weight in training.
        """
        self.past, self._rows, self._dropout = list(past), target_ids.shape[0], dropout
        self.present: list[KeyValue] = []
        past_len = past[0].key.shape[2]
        self.key_len = past_len + target_ids.shape[1]
        self.positions = torch.arange(past_len, self.key_len, device=target_ids.device)[None]
        self.mask = torch.arange(self.key_len, device=target_ids.device) <= self.positions[:, None, :, None]

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
        """Append keys and values and attend; see `SelfAttention`."""
        query, key, value = (split_rows(part, self._rows) for part in (query, key, value))
        kept = self.update(layer, KeyValue(key, value))
        return merge_rows(
            dot_product_attention(
                query, kept.key, kept.value, self.mask, bias, scale=scale, softcap=softcap, dropout=self._dropout
            )
        )

    def update(self, layer: int, new: KeyValue) -> KeyValue:
        """Append new keys and values [rows, kv_heads, target_len, …]; return all."""
        past = self.past[layer]
        present = KeyValue(torch.cat((past.key, new.key), 2), torch.cat((past.value, new.value), 2))
        self.present.append(present)
        return present


class RowCache:
    """Buffers of fixed capacity, written in place at each row's own position.

    The static decoder graph works in the same way.

    Attributes:
        buffers: one `KeyValue` per layer, [rows, kv_heads, capacity, …]. Values after a row's tokens have weight 0 and
            may be any finite number; fill new buffers with 0, because 0 · NaN is NaN.
        positions: of the new tokens, int64 [rows, target_len].
        key_len: tokens of the longest row after the pass; later values are not read.
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
        """Write keys and values into the buffers and attend; see `SelfAttention`."""
        rows = len(self._rows)
        kept = self.update(layer, KeyValue(split_rows(key, rows), split_rows(value, rows)))
        query = split_rows(query, rows)
        return merge_rows(
            dot_product_attention(query, kept.key, kept.value, self.mask, bias, scale=scale, softcap=softcap)
        )

    def update(self, layer: int, new: KeyValue) -> KeyValue:
        """Write new keys and values [rows, kv_heads, target_len, …]; return views of all."""
        buffer = self.buffers[layer]
        for kept, added in ((buffer.key, new.key), (buffer.value, new.value)):
            kept[self._rows, :, self.positions] = added.transpose(1, 2)
        return KeyValue(buffer.key[:, :, : self.key_len], buffer.value[:, :, : self.key_len])


def split_rows(x: Tensor, rows: int) -> Tensor:
    """View `x` [rows · len, heads, width] as [rows, heads, len, width]."""
    return x.reshape(rows, -1, *x.shape[1:]).transpose(1, 2)


def merge_rows(x: Tensor) -> Tensor:
    """Convert `x` [rows, heads, len, width] to [rows · len, heads · width]."""
    return x.transpose(1, 2).flatten(2).flatten(0, 1)
