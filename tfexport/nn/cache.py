"""Define attention, recurrences and the caches of the decoder.

A layer projects and calls `attend` or `recur`; the object that it calls decides what is stored and how. The decoder
variants in `tfexport.export.decoders` are subclasses. New tokens share one axis, [rows · target_len, heads, head_dim];
stored keys and values have the heads first.

If there are fewer key heads than query heads, adjacent query heads share a key head (arXiv:2305.13245), which is
repeated for them. TensorRT fuses attention with repeated keys, but not attention with regrouped queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from tfexport.contract import CacheKind

# Finite, so that a fully masked row is not NaN, and within the range of float16.
MASK_FILL = -1e4


@dataclass(frozen=True)
class KeyValue:
    """Keys and values of one attention, [rows, kv_heads, len, head_dim or value_dim]."""

    key: Tensor
    value: Tensor


class SelfAttention:
    """Self-attention of all layers; subclasses replace `update`, or all of `attend`."""

    rows: int  # of the pass
    mask: Tensor  # bool, True = attend; [rows, keys], or [rows or 1, 1, len, keys]
    dropout: float = 0.0  # probability of dropping an attention weight in training

    def attend(
        self,
        layer: int,  # from 0; called once for each layer, in order
        query: Tensor,  # of the new tokens, [rows · len, heads, head_dim]
        key: Tensor,  # [rows · len, kv_heads, head_dim]; kv_heads divides heads
        value: Tensor,  # [rows · len, kv_heads, value_dim]
        bias: Tensor | None = None,  # added to the scores, [rows or 1, heads, len, keys]
        *,
        scale: float,  # factor on the scores
        softcap: float = 0.0,  # limit of the scores, see `dot_product_attention`
    ) -> Tensor:
        """Store a layer's new keys and values, and attend to all tokens that are visible.

        The context of each new token has its heads concatenated, [rows · len, heads · value_dim].
        """
        query, key, value = (split_rows(part, self.rows) for part in (query, key, value))
        stored = self.update(layer, KeyValue(key, value))
        return merge_rows(self._context(query, stored, bias, scale, softcap))

    def _context(self, query: Tensor, stored: KeyValue, bias: Tensor | None, scale: float, softcap: float) -> Tensor:
        mask = self.mask if self.mask.dim() == 4 else self.mask[:, None, None, :]
        return dot_product_attention(
            query, stored.key, stored.value, mask, bias, scale=scale, softcap=softcap, dropout=self.dropout
        )

    def update(self, layer: int, new: KeyValue) -> KeyValue:
        """Store new keys and values [rows, kv_heads, len, …]; return all that are stored."""
        return new


class Source(SelfAttention):
    """Self-attention of an encoder; `mask` is bool [batch, source_len]."""

    def __init__(self, mask: Tensor, *, dropout: float = 0.0) -> None:
        self.mask, self.rows, self.dropout = mask, mask.shape[0], dropout

    def with_mask(self, mask: Tensor) -> Self:
        """Return the same attention between the positions of another mask."""
        return type(self)(mask, dropout=self.dropout)


class Cross:
    """Cross-attention of a decoder to keys and values that are computed once.

    `key_values` of each decoder layer are [batch, kv_heads, source_len, …]; `mask` is bool [batch, source_len].
    """

    def __init__(self, key_values: Sequence[KeyValue], mask: Tensor, *, dropout: float = 0.0) -> None:
        self.key_values, self.mask, self._dropout = key_values, mask, dropout

    def attend(self, layer: int, query: Tensor, *, scale: float, softcap: float = 0.0) -> Tensor:
        """Attend to the source; `query` is [rows · target_len, heads, head_dim].

        The rows of one source are adjacent. The result is [rows · target_len, heads · value_dim].
        """
        stored, mask = self.key_values[layer], self.mask[:, None, None, :]
        query = split_rows(query, self.mask.shape[0])  # the rows of a source become query positions
        return merge_rows(
            dot_product_attention(
                query, stored.key, stored.value, mask, scale=scale, softcap=softcap, dropout=self._dropout
            )
        )


class Cache(SelfAttention):
    """Self-attention of a decoder: past tokens and the new tokens of one pass."""

    positions: Tensor  # of every new token, int64 [rows or 1, target_len]
    key_len: int  # number of keys, at positions 0, 1, …, that a bias has to cover

    def _begin(self, rows: int, positions: Tensor, key_len: int) -> None:
        self.rows, self.positions, self.key_len = rows, positions, key_len
        self.mask = torch.arange(key_len, device=positions.device) <= positions[:, None, :, None]


class ConcatCache(Cache):
    """A cache that concatenates the `past` and the new tokens to `present`."""

    def __init__(self, past: Sequence[KeyValue], target_ids: Tensor, *, dropout: float = 0.0) -> None:
        self.past, self.dropout = list(past), dropout
        self.present: list[KeyValue] = []
        past_len = past[0].key.shape[2]
        key_len = past_len + target_ids.shape[1]
        self._begin(target_ids.shape[0], torch.arange(past_len, key_len, device=target_ids.device)[None], key_len)

    def following(self, target_ids: Tensor) -> ConcatCache:
        """Return the cache of the next pass, over tokens int64 [rows, target_len]."""
        return ConcatCache(self.present, target_ids, dropout=self.dropout)

    def update(self, layer: int, new: KeyValue) -> KeyValue:
        """See `SelfAttention.update`."""
        past = self.past[layer]
        self.present.append(KeyValue(torch.cat((past.key, new.key), 2), torch.cat((past.value, new.value), 2)))
        return self.present[-1]


class RowCache(Cache):
    """Buffers of fixed capacity, written in place at each row's own position.

    Fill new `buffers`, one per layer, with 0: values after a row's tokens have weight 0, but 0 · NaN is NaN.
    """

    def __init__(self, buffers: Sequence[KeyValue], target_ids: Tensor, lengths: Tensor) -> None:
        """Begin a pass; `lengths`, int64 [rows], counts the cached tokens of each row."""
        self.buffers = buffers
        positions = lengths[:, None] + torch.arange(target_ids.shape[1], device=lengths.device)
        self._begin(len(lengths), positions, int(positions.max()) + 1)
        self._rows = torch.arange(self.rows, device=lengths.device)[:, None]

    def update(self, layer: int, new: KeyValue) -> KeyValue:
        """Write new keys and values; return views of all that are stored."""
        buffer = self.buffers[layer]
        for stored, added in ((buffer.key, new.key), (buffer.value, new.value)):
            stored[self._rows, :, self.positions] = added.transpose(1, 2)
        return KeyValue(buffer.key[:, :, : self.key_len], buffer.value[:, :, : self.key_len])


class StateCache:
    """One state for each recurrent layer, [rows, width], float32 or wider.

    There is no state before position 0, whatever `past` holds, so a new row needs no preparation.
    """

    key_len = 0

    def __init__(
        self, past: Sequence[Tensor], target_ids: Tensor, cache_lengths: Tensor, *, longest: int | None = None
    ) -> None:
        """Begin a pass; `cache_lengths`, int64 [rows], counts the tokens read before.

        A trace with a variable number of new tokens needs the largest one, `longest`.
        """
        self.past, self.present = past, list[Tensor]()
        self.positions = cache_lengths[:, None] + torch.arange(target_ids.shape[1], device=target_ids.device)
        self._longest = target_ids.shape[1] if longest is None else longest
        self._has_past = self.positions[:, :1] > 0

    def following(self, target_ids: Tensor) -> StateCache:
        """Return the cache of the next pass, over tokens int64 [rows, target_len]."""
        return StateCache(self.present, target_ids, self.positions[:, -1] + 1)

    def recur(self, layer: int, factor: Tensor, term: Tensor) -> Tensor:
        """Store and return state = factor · state + term after each new token.

        All are [rows · len, width]. It is called once for each layer, in order.
        """
        before, dtype = torch.where(self._has_past, self.past[layer], 0), factor.dtype
        factor, term = factor.to(before.dtype), term.to(before.dtype)
        if self._longest == 1:
            states = newest = factor * before + term
        else:
            rows = before.shape[0]
            factor, term = (part.reshape(rows, -1, part.shape[1]) for part in (factor, term))
            factor, term = linear_scan(factor, term, self._longest)
            states = factor * before[:, None] + term
            states, newest = states.flatten(0, 1), states[:, -1]
        self.present.append(newest)
        return states.to(dtype)

    def average(self, layer: int, x: Tensor) -> Tensor:
        """Return the mean of `x` [rows · len, width] over each token and all earlier ones."""
        before, dtype = self.positions.reshape(-1, 1).to(self.past[layer].dtype), x.dtype
        return self.recur(layer, before / (before + 1), x / (before + 1)).to(dtype)


class RowStateCache(StateCache):
    """States that are updated in place."""

    def recur(self, layer: int, factor: Tensor, term: Tensor) -> Tensor:
        """See `StateCache.recur`."""
        states = super().recur(layer, factor, term)
        self.past[layer].copy_(self.present[layer])
        return states


def linear_scan(factor: Tensor, term: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """Join the steps x → factor · x + term of each token and all tokens before it.

    Both are [rows, len, width]; `longest` is an upper bound of len. Doubling the number of joined steps takes
    log₂(longest) additions, which are as exact as one after the other: no factor is divided by.
    """
    joined = 1
    while joined < longest:
        earlier_factor, earlier_term = (
            F.pad(part, (0, 0, joined, 0), value=neutral)[:, : part.shape[1]]
            for part, neutral in ((factor, 1.0), (term, 0.0))
        )
        factor, term = factor * earlier_factor, factor * earlier_term + term
        joined *= 2
    return factor, term


def empty_cache(
    kind: CacheKind, target_ids: Tensor, like: Tensor, *, dropout: float = 0.0, longest: int | None = None
) -> ConcatCache | StateCache:
    """Return a cache without past for the first tokens, int64 [rows, target_len].

    Keys and values have the type and device of `like`; `longest` is that of `StateCache`.
    """
    rows = target_ids.shape[0]
    past = empty_buffers(kind, rows, 0, like)
    if kind.grows:
        return ConcatCache(paired(past), target_ids, dropout=dropout)
    return StateCache(past, target_ids, target_ids.new_zeros(rows), longest=longest)


def empty_buffers(kind: CacheKind, rows: int, length: int, like: Tensor) -> list[Tensor]:
    """Return zeros for some rows and tokens, with the device and precision of `like`."""
    dtype = like.dtype if kind.grows else torch.promote_types(like.dtype, torch.float32)
    return [like.new_zeros(shape, dtype=dtype) for shape in kind.shapes(rows, length)]


def row_cache(
    kind: CacheKind, buffers: Sequence[Tensor], target_ids: Tensor, lengths: Tensor
) -> RowCache | RowStateCache:
    """Return a cache that updates buffers in place; `lengths` as in `RowCache`."""
    if kind.grows:
        return RowCache(paired(buffers), target_ids, lengths)
    return RowStateCache(buffers, target_ids, lengths)


def paired(tensors: Sequence[Tensor]) -> list[KeyValue]:
    """Join alternating keys and values."""
    return [KeyValue(key, value) for key, value in zip(tensors[::2], tensors[1::2], strict=True)]


def flattened(stored: Sequence[KeyValue | Tensor]) -> list[Tensor]:
    """Return keys and values in turn, or states as they are."""
    parts = ((one,) if isinstance(one, Tensor) else (one.key, one.value) for one in stored)
    return [part for each in parts for part in each]


def split_rows(x: Tensor, rows: int) -> Tensor:
    """View `x` [rows · len, heads, width] as [rows, heads, len, width]."""
    return x.reshape(rows, -1, *x.shape[1:]).transpose(1, 2)


def merge_rows(x: Tensor) -> Tensor:
    """Convert `x` [rows, heads, len, width] to [rows · len, heads · width]."""
    return x.transpose(1, 2).flatten(2).flatten(0, 1)


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

    `mask` (bool, True = attend) and `bias` are broadcast to the scores [rows, heads, target_len, len]. `softcap` limits
    the scores to softcap · tanh(scores / softcap) before the bias; 0 for no limit.
    """
    weights = attention_weights(query, key, mask, bias, scale=scale, softcap=softcap)
    weights = F.dropout(weights, dropout, training=dropout > 0)
    return weights.to(value.dtype) @ _repeated(value, query.shape[1])


def attention_weights(
    query: Tensor, key: Tensor, mask: Tensor, bias: Tensor | None = None, *, scale: float, softcap: float = 0.0
) -> Tensor:
    """Compute the weights of `dot_product_attention`, float32 or wider."""
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
