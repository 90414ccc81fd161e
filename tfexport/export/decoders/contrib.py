"""The contrib variant: attention in ONNX Runtime's own operators, for its CPU.

One operator computes the whole attention, and one matrix product computes query, key and value. The operator writes the
cache of the static variant in place and reads only the filled part of it. See
https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from tfexport.contract import ENCODER_CONTRIB
from tfexport.export.decoders._variant import SUPPORTED, DecoderVariant, ModuleTraits, TracedCache, unsupported
from tfexport.export.passes import join_products
from tfexport.nn.attention import MultiHeadAttention
from tfexport.nn.cache import MASK_FILL, Cross, KeyValue, Source
from tfexport.nn.config import TransformerConfig
from tfexport.precision import Precision

_DOMAIN = "com.microsoft"
# `GroupQueryAttention` needs head widths that are multiples of this.
_HEAD_DIM_STEP = 8
_SUPPORTED = {**SUPPORTED, "attention_softcap": (0.0,)}


def supports(traits: TransformerConfig | ModuleTraits, precision: Precision) -> list[str]:
    """List the properties of a model that the operators cannot compute."""
    if isinstance(traits, ModuleTraits):
        has_decoder, width, value_width = traits.has_decoder, traits.head_dim, traits.value_dim
        others = ["a layer computes attention itself instead of calling cache.attend"] if traits.by_hand else []
        others += ["scores are capped"] if traits.softcap else []
    else:
        has_decoder, others = traits.decoder is not None, unsupported(traits, _SUPPORTED)
        width, value_width = (traits.d_k("decoder"), traits.d_v("decoder")) if has_decoder else (0, 0)
    if not has_decoder:
        return ["the model is encoder-only"]
    if width != value_width:
        others.insert(0, f"keys have width {width} and values {value_width}, expected equal widths")
    elif width % _HEAD_DIM_STEP:
        others.insert(0, f"heads have width {width}, expected a multiple of {_HEAD_DIM_STEP}")
    return others if precision == "fp32" else [*others, f"precision is {precision}, expected fp32"]


def joint_weights(model: nn.Module) -> Iterator[tuple[str, ...]]:
    """Yield groups of parameters that the contrib variant reads as one matrix."""
    for name, module in model.named_modules():
        if isinstance(module, MultiHeadAttention) and name.endswith(".self"):
            for kind, _ in module.q.named_parameters():
                yield tuple(f"{name}.{part}.{kind}" for part in ("q", "k", "v"))


class ContribCache(TracedCache):
    """The buffers of the static variant, written by the attention operator.

    It works only in a trace, is always causal, and has no mask and no `update`.
    """

    def __init__(
        self,
        past: Sequence[KeyValue],
        target_ids: Tensor,
        positions: Tensor,
        last_position: Tensor,
        total_length: Tensor,
    ) -> None:
        """Begin a step on the buffers `past`.

        `positions`, int64 [rows, target_len], and `last_position`, int32 [rows], are those of the new tokens.
        `total_length`, int32 [1], counts the tokens in the cache after the step.
        """
        self.past, self.present = past, []
        self.positions, self.key_len = positions, past[0].key.shape[2]
        self._last_position, self._total_length = last_position, total_length

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
        past = self.past[layer]
        # The operator expects them concatenated, and `join_products` computes them in one product.
        packed = _by_rows(torch.cat((query, key, value), 1), self.positions)
        width = query.shape[1] * value.shape[2]
        context, present_key, present_value = torch.onnx.ops.symbolic_multi_out(
            f"{_DOMAIN}::GroupQueryAttention",
            (packed, None, None, past.key, past.value, self._last_position, self._total_length, *self._bias(bias)),
            {"num_heads": query.shape[1], "kv_num_heads": key.shape[1], "scale": scale},
            dtypes=[packed.dtype] * 3,
            shapes=[(*packed.shape[:2], width), past.key.shape, past.value.shape],
            version=1,
        )
        self.present.append(KeyValue(present_key, present_value))
        return context.flatten(0, 1)

    def _bias(self, bias: Tensor | None) -> tuple[Tensor | None, ...]:
        """Cut a bias [rows or 1, heads, len, capacity] to the keys in the cache."""
        if bias is None:
            return ()
        bounds = (torch.tensor([0], dtype=torch.int32), self._total_length, torch.tensor([3], dtype=torch.int32))
        shorter = torch.onnx.ops.symbolic("Slice", (bias, *bounds), dtype=bias.dtype, shape=bias.shape, version=18)
        return (None, None, None, shorter)  # after the rotary tables: the rotation is already applied


class ContribCross(Cross):
    """Cross-attention without repeated keys: beams become query positions."""

    def attend(self, layer: int, query: Tensor, *, scale: float, softcap: float = 0.0) -> Tensor:
        """Attend to the source; see `Cross`."""
        key, value = self.key_values[layer].key, self.key_values[layer].value
        heads, width = key.shape[1], value.shape[3]
        shared = query.shape[1] // heads
        if shared > 1:
            # The operator does not support shared keys, so query heads that share a key become query positions.
            query = query.unflatten(1, (heads, shared)).transpose(1, 2).flatten(0, 1)  # type: ignore[no-untyped-call]
        context = _attention(query, key, value, self.mask, heads * width, scale, scales_query=True)
        if shared == 1:
            return context
        return context.unflatten(1, (heads, width)).unflatten(0, (-1, shared)).transpose(1, 2).flatten(1)  # type: ignore[no-untyped-call, no-any-return]


class ContribSource(Source):
    """Self-attention of source tokens; the operator splits the heads."""

    is_masked = True

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
        width, shared = query.shape[1] * value.shape[2], query.shape[1] // key.shape[1]
        # The operator does not support shared keys; repeating them is cheap, because the encoder runs once.
        key, value = (part if shared == 1 else part.repeat_interleave(shared, 1) for part in (key, value))
        key, value = _by_rows(key, self.mask), _by_rows(value, self.mask)
        return _attention(query, key, value, self.mask, width, scale, bias, is_masked=self.is_masked)


class WholeSource(ContribSource):
    """Self-attention of sources without padding, with a faster kernel."""

    is_masked = False


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    width: int,
    scale: float,
    bias: Tensor | None = None,
    *,
    scales_query: bool = False,
    is_masked: bool = True,
) -> Tensor:
    """Attend from `query` [batch · len, heads, head_dim] to the tokens of `mask`."""
    masks = (None, mask.to(torch.int32)) if is_masked else (None, None) if bias is not None else ()
    packed = _by_rows(query, mask)
    if scales_query and scale != 1:  # the operator can then use a kernel that is up to twice as fast in a decode step
        packed, scale = packed * scale, 1.0
    context = torch.onnx.ops.symbolic(
        f"{_DOMAIN}::MultiHeadAttention",
        (packed, key, value, *masks, *(() if bias is None else (bias,))),
        {"num_heads": query.shape[1], "scale": scale, "mask_filter_value": MASK_FILL},
        dtype=query.dtype,
        shape=(*packed.shape[:2], width),
        version=1,
    )
    return context.flatten(0, 1)


def _by_rows(x: Tensor, rows: Tensor) -> Tensor:
    """View `x` [rows · len, heads, width] as [rows, len, heads · width]."""
    # PyTorch would compute `len` with about six operators; ONNX accepts -1.
    operator, long = torch.onnx.ops.symbolic, torch.int64
    width = x.shape[1] * x.shape[2]
    count = operator("Shape", (rows,), {"start": 0, "end": 1}, dtype=long, shape=(1,), version=18)
    shape = operator("Concat", (count, torch.tensor([-1, width])), {"axis": 0}, dtype=long, shape=(3,), version=18)
    sizes = (rows.shape[0], x.shape[0] // rows.shape[0], width)
    return operator("Reshape", (x, shape), dtype=x.dtype, shape=sizes, version=18)


CONTRIB = DecoderVariant(
    supports=supports,
    cache=ContribCache,
    cross=ContribCross,
    source=ContribSource,
    whole_source=WholeSource,
    encoder=ENCODER_CONTRIB,
    portable=False,
    passes=(join_products,),
)
