"""Multi-head attention: the projections around a cache that attends."""

from __future__ import annotations

import math

from torch import Tensor, nn

from tfexport.models.cache import Cross, KeyValue, SelfAttention, split_rows


class MultiHeadAttention(nn.Module):
    """Attention in heads ("Attention is all you need", §3.2.2).

    Tokens lie in one axis, [rows · len, d_model]: every projection is one
    matrix product. How keys and values are kept, and how queries attend to
    them, is the affair of the cache that is given to each call.
    """

    def __init__(self, d_model: int, num_heads: int, d_k: int, d_v: int, *, scale: float | None, bias: bool) -> None:
        """Create the four projections; `scale` None means 1/sqrt(d_k)."""
        super().__init__()
        self.num_heads = num_heads
        self.scale = 1 / math.sqrt(d_k) if scale is None else scale
        self.q = nn.Linear(d_model, num_heads * d_k, bias=bias)
        self.k = nn.Linear(d_model, num_heads * d_k, bias=bias)
        self.v = nn.Linear(d_model, num_heads * d_v, bias=bias)
        self.o = nn.Linear(num_heads * d_v, d_model, bias=bias)

    def forward(self, x: Tensor, cache: SelfAttention, layer: int, bias: Tensor | None = None) -> Tensor:
        """Attend from the tokens of `x` to themselves and to what `cache` keeps of earlier ones.

        Args:
            x: [rows · len, d_model].
            cache: attends, and keeps the new keys and values.
            layer: number of this layer, from 0.
            bias: added to the scores, [rows or 1, heads, len, keys].

        Returns:
            [rows · len, d_model].
        """
        query, key, value = (self._heads(part(x)) for part in (self.q, self.k, self.v))
        return self.o(cache.attend(layer, query, key, value, bias, scale=self.scale))  # type: ignore[no-any-return]

    def attend_source(self, x: Tensor, cross: Cross, layer: int) -> Tensor:
        """Attend from the tokens of `x` [rows · target_len, d_model] to the source; the shape stays."""
        return self.o(cross.attend(layer, self._heads(self.q(x)), scale=self.scale))  # type: ignore[no-any-return]

    def key_value(self, x: Tensor, batch: int) -> KeyValue:
        """Project the encoder's output `x` [batch · source_len, d_model] to what `attend_source` needs of it."""
        return KeyValue(split_rows(self._heads(self.k(x)), batch), split_rows(self._heads(self.v(x)), batch))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (self.num_heads, x.shape[1] // self.num_heads))  # type: ignore[no-any-return, no-untyped-call]
