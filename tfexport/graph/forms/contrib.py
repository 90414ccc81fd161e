"""The model in ONNX Runtime's own operators: the contrib form, for its CPU.

An attention is one operator, query, key and value one product, and the cache of
the static form is written in place by the attention itself, which reads it no
further than it is filled. The operators are documented in
https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tfexport.models.attention import MASK_FILL, MultiHeadAttention
from tfexport.models.cache import KeyValue
from tfexport.models.config import TransformerConfig
from tfexport.models.transformer import Transformer

_DOMAIN = "com.microsoft"
# What divides the width of a head in `GroupQueryAttention`.
_HEAD_DIM_STEP = 8


def contrib_problems(model: nn.Module) -> list[str]:
    """Say what of a model the operators cannot do; the other forms can."""
    if not isinstance(model, Transformer):
        return ["it is a module of its own"]
    config: TransformerConfig = model.config
    problems = []
    if config.decoder is None:
        return ["it is an encoder alone"]
    if config.d_k("decoder") != config.d_v("decoder") or config.d_k("decoder") % _HEAD_DIM_STEP:
        problems.append(f"keys and values are not equally wide, or {_HEAD_DIM_STEP} does not divide that")
    if config.relative_bias != "none":
        problems.append("it has a relative bias")
    if model.enc.embed.weight.dtype != torch.float32:
        problems.append("it is not fp32")
    return problems


def joint_weights(model: nn.Module) -> Iterator[tuple[str, ...]]:
    """Name the parameters that the contrib form reads as one: they have to lie side by side."""
    for name, module in model.named_modules():
        if isinstance(module, MultiHeadAttention) and name.endswith(".self"):
            for kind, _ in module.q.named_parameters():
                yield tuple(f"{name}.{part}.{kind}" for part in ("q", "k", "v"))


def to_contrib(model: Transformer) -> Transformer:
    """Return a copy of the model to trace: its attentions are the operators, what it computes is the same.

    Its decoder takes a `ContribCache`, and its weights stay those of `model` but for query, key and value, joined.
    """
    shared = {id(parameter): parameter for parameter in model.parameters()}
    contrib = copy.deepcopy(model, shared)
    assert contrib.dec is not None
    for block in cast("Iterable[Any]", contrib.enc.blocks):
        block.self = _EncoderAttention(block.self)
    for block in cast("Iterable[Any]", contrib.dec.blocks):
        block.self, block.cross = _CachedAttention(block.self), _CrossAttention(block.cross)
    return contrib


@dataclass(frozen=True)
class _Packed:
    """Query, key and value of new tokens, [rows · target_len, 3 · heads · head_dim], and how to attend with them."""

    query_key_value: Tensor
    num_heads: int
    scale: float


class ContribCache:
    """The buffers of the static form, which the attention itself writes.

    It exists only in a trace: `GroupQueryAttention` has no PyTorch twin.
    """

    def __init__(
        self, past: Sequence[KeyValue], positions: Tensor, last_position: Tensor, total_length: Tensor
    ) -> None:
        """Start from buffers [rows, heads, capacity, head_dim].

        Args:
            past: of each layer.
            positions: of the new tokens, int64 [rows, target_len].
            last_position: the last of them, int32 [rows].
            total_length: tokens in the cache after the step, int32 [1].
        """
        self.past = past
        self._positions, self._last_position, self._total_length = positions, last_position, total_length
        self.present: list[KeyValue] = []

    def positions(self, target_ids: Tensor) -> Tensor:
        """Return int64 [rows, target_len]."""
        return self._positions

    def mask(self, target_ids: Tensor) -> Tensor:
        """Return what nobody reads: the operator is causal by itself."""
        return self._positions

    def update(self, layer: int, new: _Packed) -> Tensor:
        """Write a layer's new keys and values and attend, [rows, target_len, heads · head_dim]."""
        past, packed = self.past[layer], _unflatten(new.query_key_value, self._positions)
        rows, target_len, width = packed.shape
        context, key, value = torch.onnx.ops.symbolic_multi_out(
            f"{_DOMAIN}::GroupQueryAttention",
            (packed, None, None, past.key, past.value, self._last_position, self._total_length),
            {"num_heads": new.num_heads, "kv_num_heads": new.num_heads, "scale": new.scale},
            dtypes=[packed.dtype] * 3,
            shapes=[(rows, target_len, width // 3), past.key.shape, past.value.shape],
            version=1,
        )
        self.present.append(KeyValue(key, value))
        return context


class _CachedAttention(nn.Module):
    """A decoder's self-attention: one product, then the cache attends."""

    def __init__(self, attention: MultiHeadAttention) -> None:
        super().__init__()
        self.num_heads, self.scale, self.o = attention.num_heads, attention.scale, attention.o
        parts = (attention.q, attention.k, attention.v)
        self.weight = nn.Parameter(torch.cat([part.weight.detach() for part in parts]))
        biases = [bias.detach() for part in parts for name, bias in part.named_parameters() if name == "bias"]
        self.bias = nn.Parameter(torch.cat(biases)) if biases else None

    def key_value(self, x: Tensor, rows: int) -> _Packed:
        """Project `x` [rows · target_len, d_model]."""
        return _Packed(F.linear(x, self.weight, self.bias), self.num_heads, self.scale)

    def forward(self, x: Tensor, context: Tensor, mask: Tensor, bias: None = None) -> Tensor:
        return self.o(context.flatten(0, 1))  # type: ignore[no-any-return]


class _CrossAttention(nn.Module):
    """Attention to the encoder's tokens: the beams of a source are query positions, so that no key is repeated."""

    def __init__(self, attention: MultiHeadAttention) -> None:
        super().__init__()
        self.num_heads, self.scale = attention.num_heads, attention.scale
        self.q, self.o, self.attention = attention.q, attention.o, attention

    def key_value(self, x: Tensor, rows: int) -> KeyValue:
        """Project `x` [rows · len, d_model] to keys and values [rows, heads, len, …]."""
        return self.attention.key_value(x, rows)

    def forward(self, x: Tensor, memory: KeyValue, mask: Tensor, bias: None = None) -> Tensor:
        """Attend from `x` [rows · target_len, d_model] to `memory`; see `MultiHeadAttention.forward`."""
        query = _unflatten(self.q(x), mask)
        padding = mask.squeeze((1, 2)).to(torch.int32)
        context = torch.onnx.ops.symbolic(
            f"{_DOMAIN}::MultiHeadAttention",
            (query, memory.key, memory.value, None, padding),
            {"num_heads": self.num_heads, "scale": self.scale, "mask_filter_value": MASK_FILL},
            dtype=query.dtype,
            shape=(*query.shape[:2], self.o.in_features),
            version=1,
        )
        return self.o(context.flatten(0, 1))  # type: ignore[no-any-return]


class _EncoderAttention(_CrossAttention):
    """An encoder's self-attention: the operator splits the heads."""

    def key_value(self, x: Tensor, rows: int) -> KeyValue:
        """Project `x` [rows · len, d_model] to keys and values [rows, len, heads · …]."""
        return KeyValue(*(part(x).unflatten(0, (rows, -1)) for part in (self.attention.k, self.attention.v)))


def _unflatten(x: Tensor, rows: Tensor) -> Tensor:
    """View `x` [rows · len, width] as [rows, len, width], as many rows as the first axis of `rows` has.

    PyTorch would work out `len`, in half a dozen operators of one number each; ONNX takes -1.
    """
    operator, long = torch.onnx.ops.symbolic, torch.int64
    count = operator("Shape", (rows,), {"start": 0, "end": 1}, dtype=long, shape=(1,), version=18)
    shape = operator("Concat", (count, torch.tensor([-1, x.shape[1]])), {"axis": 0}, dtype=long, shape=(3,), version=18)
    sizes = (rows.shape[0], x.shape[0] // rows.shape[0], x.shape[1])
    return operator("Reshape", (x, shape), dtype=x.dtype, shape=sizes, version=18)
