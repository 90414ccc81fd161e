"""The static form: buffers of fixed capacity, and one ONNX `Attention` for each attention of the decoder."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from tfexport.graph.forms.form import OUTSIDE_ATTENTION, DecoderForm, Supported, unsupported
from tfexport.models.cache import KeyValue, merge_rows, split_rows
from tfexport.models.config import TransformerConfig
from tfexport.models.dot_product import MASK_FILL
from tfexport.spec import STATIC_OPSET, Precision

SUPPORTED: Supported = {
    **OUTSIDE_ATTENTION,
    "positions": ("table", "none"),
    "relative_bias": ("none", "t5", "t5_per_layer"),
    **dict.fromkeys(("num_heads", "d_k", "d_v", "attention_bias", "attention_scale")),
    **dict.fromkeys(("relative_buckets", "relative_max_distance")),
}


def supports(config: TransformerConfig | None, precision: Precision) -> list[str]:
    """Say what of a model this form cannot do; a module of its own calls the same `attend`."""
    return [] if config is None else unsupported(config, SUPPORTED)


class StaticCache:
    """Buffers of fixed capacity, written in place at each row's own position.

    `TensorScatter` (ONNX opset 24) has no PyTorch twin: this cache exists only in a trace.
    `tfexport.models.row_cache.RowCache` does the same in PyTorch.

    Attributes:
        past: one `KeyValue` a layer, [rows, heads, capacity, …].
        present: filled by `attend`, of the same shapes.
        positions: int64 [rows, target_len].
        key_len: the capacity.
        mask: the causal mask over the whole buffer, bool [rows, 1, target_len, capacity].
    """

    def __init__(self, past: Sequence[KeyValue], target_ids: Tensor, cache_lengths: Tensor) -> None:
        """Begin a pass of `target_ids` [rows, target_len] over buffers filled up to `cache_lengths` int64 [rows]."""
        self.past, self._cache_lengths = past, cache_lengths
        self.present: list[KeyValue] = []
        self.key_len = past[0].key.shape[2]
        self.positions = cache_lengths[:, None] + torch.arange(target_ids.shape[1])
        self.mask = torch.arange(self.key_len) <= self.positions[:, None, :, None]

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None, *, scale: float
    ) -> Tensor:
        """Write the new tokens of `layer` and attend; see `tfexport.models.cache.SelfAttention`."""
        rows = self.past[layer].key.shape[0]
        kept = self.update(layer, KeyValue(split_rows(key, rows), split_rows(value, rows)))
        return _attention(split_rows(query, rows), kept, self.mask, bias, scale)

    def update(self, layer: int, new: KeyValue) -> KeyValue:
        """Write new keys and values [rows, heads, target_len, …] into the buffers of `layer` and return them."""
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
    """Keys and values of the source, read by one `Attention`."""

    def __init__(self, key_values: Sequence[KeyValue], mask: Tensor) -> None:
        """Take each layer's [batch, heads, source_len, …] and the mask, bool [batch, source_len]."""
        self.key_values, self.mask = key_values, mask

    def attend(self, layer: int, query: Tensor, *, scale: float) -> Tensor:
        """Attend to the source; see `tfexport.models.cache.Cross`."""
        kept = self.key_values[layer]
        return _attention(split_rows(query, kept.key.shape[0]), kept, self.mask[:, None, None, :], None, scale)


def _attention(query: Tensor, kept: KeyValue, mask: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """Do what `dot_product_attention` does in one operator, which becomes ONNX `Attention`.

    The mask is expanded to every query: some runtimes refuse or misread a broadcast one. It is added to the scores:
    from one of bool TensorRT-RTX first works out which keys are left, and fails where 8 does not divide head_dim.
    """
    mask = torch.where(mask, 0.0 if bias is None else bias, MASK_FILL).to(query.dtype)
    mask = mask.expand(query.shape[0], -1, query.shape[2], kept.key.shape[2])
    return merge_rows(F.scaled_dot_product_attention(query, kept.key, kept.value, attn_mask=mask, scale=scale))


STATIC = DecoderForm(supports=supports, cache=StaticCache, cross=StaticCross, opset=STATIC_OPSET)
