"""Multi-head attention: the projections around a cache that computes attention."""

from __future__ import annotations

import math

from torch import Tensor, nn

from tfexport.nn.cache import Cross, KeyValue, SelfAttention, split_rows
from tfexport.nn.layers import LayerNorm
from tfexport.nn.positions import Rotation
from tfexport.nn.switches import QkNorm


class MultiHeadAttention(nn.Module):
    """Multi-head attention; several query heads may share keys and values.

    See "Attention is all you need", §3.2.2. Tokens share one axis, [rows · len, d_model]. `d_k` and `d_v` are the
    widths of one head. The cache given to each call stores keys and values and computes the attention. `source_width`
    is that of the encoder in cross-attention, if it is not d_model.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        d_k: int,
        d_v: int,
        *,
        scale: float | None,
        bias: bool,
        source_width: int | None = None,
        num_kv_heads: int | None = None,
        softcap: float = 0.0,
        qk_norm: QkNorm = "none",
        norms: tuple[LayerNorm, LayerNorm] | None = None,
    ) -> None:
        super().__init__()
        kv_heads = num_kv_heads or num_heads
        self.num_heads, self.num_kv_heads, self.softcap, self.qk_norm = num_heads, kv_heads, softcap, qk_norm
        self.scale = 1 / math.sqrt(d_k) if scale is None else scale
        self.q = nn.Linear(d_model, num_heads * d_k, bias=bias)
        self.k = nn.Linear(source_width or d_model, kv_heads * d_k, bias=bias)
        self.v = nn.Linear(source_width or d_model, kv_heads * d_v, bias=bias)
        self.o = nn.Linear(num_heads * d_v, d_model, bias=bias)
        self.q_norm = norms[0] if norms else None
        self.k_norm = norms[1] if norms else None

    def forward(
        self, x: Tensor, cache: SelfAttention, layer: int, bias: Tensor | None = None, rotation: Rotation | None = None
    ) -> Tensor:
        """Attend from tokens `x` [rows · len, d_model] to themselves and earlier tokens."""
        query, key = self._query(x, rotation), self._key(x, rotation)
        value = _heads(self.v(x), self.num_kv_heads)
        return self.o(cache.attend(layer, query, key, value, bias, scale=self.scale, softcap=self.softcap))  # type: ignore[no-any-return]

    def attend_source(self, x: Tensor, cross: Cross, layer: int, rotation: Rotation | None = None) -> Tensor:
        """Attend from target tokens `x` [rows · target_len, d_model] to the source."""
        context = cross.attend(layer, self._query(x, rotation), scale=self.scale, softcap=self.softcap)
        return self.o(context)  # type: ignore[no-any-return]

    def key_value(self, x: Tensor, batch: int, rotation: Rotation | None = None) -> KeyValue:
        """Project encoder output `x` [batch · source_len, …] to keys and values."""
        value = _heads(self.v(x), self.num_kv_heads)
        return KeyValue(split_rows(self._key(x, rotation), batch), split_rows(value, batch))

    def _query(self, x: Tensor, rotation: Rotation | None) -> Tensor:
        return self._normalized(self.q(x), self.q_norm, self.num_heads, rotation)

    def _key(self, x: Tensor, rotation: Rotation | None) -> Tensor:
        return self._normalized(self.k(x), self.k_norm, self.num_kv_heads, rotation)

    def _normalized(self, x: Tensor, norm: LayerNorm | None, heads: int, rotation: Rotation | None) -> Tensor:
        if norm is not None and self.qk_norm == "all":
            x = norm(x)
        x = _heads(x, heads)
        if norm is not None and self.qk_norm == "head":
            x = norm(x)
        return x if rotation is None else rotation(x)


def _heads(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(1, (heads, x.shape[1] // heads))  # type: ignore[no-any-return, no-untyped-call]
