"""Attention in heads: the projections around a cache that attends."""

from __future__ import annotations

import math

from torch import Tensor, nn

from tfexport.nn.cache import Cross, KeyValue, SelfAttention, split_rows
from tfexport.nn.layers import LayerNorm
from tfexport.nn.positions import Rotation
from tfexport.nn.switches import QkNorm


class MultiHeadAttention(nn.Module):
    """Attention in heads ("Attention is all you need", §3.2.2), of which several may share keys and values.

    Tokens lie in one axis, [rows · len, d_model]: every projection is one
    matrix product. How keys and values are kept, and how queries attend to
    them, is the affair of the cache that is given to each call.
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
        num_kv_heads: int | None = None,
        softcap: float = 0.0,
        qk_norm: QkNorm = "none",
        norms: tuple[LayerNorm, LayerNorm] | None = None,
    ) -> None:
        """Create the four projections.

        Args:
            d_model: width of the tokens.
            num_heads: of the queries.
            d_k: width of one head of queries and keys.
            d_v: width of one head of values.
            scale: factor on the scores; None means 1/sqrt(d_k).
            bias: of the projections.
            num_kv_heads: of keys and values; None means as many as `num_heads`.
            softcap: where the scores level off; 0 for nowhere.
            qk_norm: what `norms` normalise.
            norms: of queries and of keys, of the width of one head or of all.
        """
        super().__init__()
        kv_heads = num_kv_heads or num_heads
        self.num_heads, self.num_kv_heads, self.softcap, self.qk_norm = num_heads, kv_heads, softcap, qk_norm
        self.scale = 1 / math.sqrt(d_k) if scale is None else scale
        self.q = nn.Linear(d_model, num_heads * d_k, bias=bias)
        self.k = nn.Linear(d_model, kv_heads * d_k, bias=bias)
        self.v = nn.Linear(d_model, kv_heads * d_v, bias=bias)
        self.o = nn.Linear(num_heads * d_v, d_model, bias=bias)
        self.q_norm = norms[0] if norms else None
        self.k_norm = norms[1] if norms else None

    def forward(
        self,
        x: Tensor,
        cache: SelfAttention,
        layer: int,
        bias: Tensor | None = None,
        rotation: Rotation | None = None,
    ) -> Tensor:
        """Attend from the tokens of `x` to themselves and to what `cache` keeps of earlier ones.

        Args:
            x: [rows · len, d_model].
            cache: attends, and keeps the new keys and values.
            layer: number of this layer, from 0.
            bias: added to the scores, [rows or 1, heads, len, keys].
            rotation: turns queries and keys to their positions.

        Returns:
            [rows · len, d_model].
        """
        query, key = self._query(x, rotation), self._key(x, rotation)
        value = _heads(self.v(x), self.num_kv_heads)
        return self.o(cache.attend(layer, query, key, value, bias, scale=self.scale, softcap=self.softcap))  # type: ignore[no-any-return]

    def attend_source(self, x: Tensor, cross: Cross, layer: int, rotation: Rotation | None = None) -> Tensor:
        """Attend from the tokens of `x` [rows · target_len, d_model] to the source; the shape stays."""
        context = cross.attend(layer, self._query(x, rotation), scale=self.scale, softcap=self.softcap)
        return self.o(context)  # type: ignore[no-any-return]

    def key_value(self, x: Tensor, batch: int, rotation: Rotation | None = None) -> KeyValue:
        """Project the encoder's output `x` [batch · source_len, d_model] to what `attend_source` needs of it."""
        value = _heads(self.v(x), self.num_kv_heads)
        return KeyValue(split_rows(self._key(x, rotation), batch), split_rows(value, batch))

    def _query(self, x: Tensor, rotation: Rotation | None) -> Tensor:
        return self._placed(self.q(x), self.q_norm, self.num_heads, rotation)

    def _key(self, x: Tensor, rotation: Rotation | None) -> Tensor:
        return self._placed(self.k(x), self.k_norm, self.num_kv_heads, rotation)

    def _placed(self, x: Tensor, norm: LayerNorm | None, heads: int, rotation: Rotation | None) -> Tensor:
        """Normalise queries or keys, all heads together or each, and turn them to their positions."""
        if norm is not None and self.qk_norm == "all":
            x = norm(x)
        x = _heads(x, heads)
        if norm is not None and self.qk_norm == "head":
            x = norm(x)
        return x if rotation is None else rotation(x)


def _heads(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(1, (heads, x.shape[1] // heads))  # type: ignore[no-any-return, no-untyped-call]
