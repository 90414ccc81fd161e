"""Attention to the source: the encoder's own, and the decoder's to what the encoder found."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tfexport.nn.cache import KeyValue, merge_rows, split_rows
from tfexport.nn.dot_product import dot_product_attention


class PaddedSource:
    """Source tokens that attend to each other, and to no padding.

    Attributes:
        mask: bool [batch, source_len], True = token.
    """

    def __init__(self, mask: Tensor, *, dropout: float = 0.0) -> None:
        """Take the mask; `dropout` is the probability of dropping an attention weight, in training."""
        self.mask, self._dropout = mask, dropout

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
        """Implement `SelfAttention.attend`."""
        query, key, value = (split_rows(part, self.mask.shape[0]) for part in (query, key, value))
        mask = self.mask[:, None, None, :]
        return merge_rows(
            dot_product_attention(query, key, value, mask, bias, scale=scale, softcap=softcap, dropout=self._dropout)
        )


class CrossCache:
    """Keys and values of the source, computed once and read in every step.

    Attributes:
        key_values: of each decoder layer, [batch, kv_heads, source_len, …].
        mask: bool [batch, source_len], True = token.
    """

    def __init__(self, key_values: Sequence[KeyValue], mask: Tensor, *, dropout: float = 0.0) -> None:
        """Take what an encoder returned, and the mask of its source; `dropout` as in `PaddedSource`."""
        self.key_values, self.mask, self._dropout = key_values, mask, dropout

    def attend(self, layer: int, query: Tensor, *, scale: float, softcap: float = 0.0) -> Tensor:
        """Implement `Cross.attend`; the beams of a source are its queries, so that no key is repeated."""
        kept, mask = self.key_values[layer], self.mask[:, None, None, :]
        query = split_rows(query, self.mask.shape[0])
        return merge_rows(
            dot_product_attention(
                query, kept.key, kept.value, mask, scale=scale, softcap=softcap, dropout=self._dropout
            )
        )
