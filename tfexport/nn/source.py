"""Attention to the source: self-attention of the encoder and cross-attention."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tfexport.nn.cache import KeyValue, merge_rows, split_rows
from tfexport.nn.dot_product import dot_product_attention


class PaddedSource:
    """Self-attention of source tokens; padding is masked.

    Attributes:
        mask: bool [batch, source_len], True = token.
    """

    def __init__(self, mask: Tensor, *, dropout: float = 0.0) -> None:
        """Set the mask, and the probability of dropping an attention weight in training."""
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
        """Attend to the tokens of the mask; see `SelfAttention`."""
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
        """Create it from an encoder's result and the mask of its source."""
        self.key_values, self.mask, self._dropout = key_values, mask, dropout

    def attend(self, layer: int, query: Tensor, *, scale: float, softcap: float = 0.0) -> Tensor:
        """Attend to the source, with its beams as query positions; see `Cross`."""
        kept, mask = self.key_values[layer], self.mask[:, None, None, :]
        query = split_rows(query, self.mask.shape[0])
        return merge_rows(
            dot_product_attention(
                query, kept.key, kept.value, mask, scale=scale, softcap=softcap, dropout=self._dropout
            )
        )
