"""The interface of decoder variants, and the concat variant."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir
from torch import Tensor

from tfexport.contract import ENCODER
from tfexport.nn.cache import Cache, ConcatCache, Cross, KeyValue, Source
from tfexport.nn.config import StackConfig, TransformerConfig
from tfexport.nn.switches import SWITCHES
from tfexport.precision import Precision

# Fields of a configuration that a variant supports, with the supported values; None means every value.
Supported = Mapping[str, Collection[object] | None]

# Supported by every variant; a variant that supports fewer values of a field overrides it. New switches of attention
# and their new values are rejected until they are listed here.
SUPPORTED: Supported = {
    # Switches outside of attention do not depend on the variant. None in a side is the value of the model.
    **{
        name: (*switch.values, None) if isinstance(switch.values, tuple) else None
        for name, switch in SWITCHES.items()
        if switch.acts not in ("attention", "cross-attention", "positions")
    },
    **dict.fromkeys(("d_model", "d_ff", "layers", "source_vocab", "target_vocab", "tokens", "dropout", "labels")),
    **dict.fromkeys(("features", "image", "speech")),
    **dict.fromkeys(("max_source_length", "max_target_length", "tie_embeddings", "tie_output")),
    **dict.fromkeys(("feed_forward_bias", "norm_bias", "output_bias")),
    "mixer": ("attention", "ssru", "average"),
    "positions": ("table", "none", "rotary"),
    "relative_bias": ("none", "t5", "t5_per_layer", "alibi"),
    **dict.fromkeys(("num_heads", "num_kv_heads", "d_k", "d_v")),
    **dict.fromkeys(("attention_bias", "attention_scale", "attention_softcap")),
    **dict.fromkeys(("relative_buckets", "relative_max_distance")),
    **dict.fromkeys(("rotary_base", "rotary_dim", "rotary_pairs", "rotary_cross")),
    **dict.fromkeys(("rotary_scaling", "rotary_factor", "rotary_original_length")),
}


@dataclass(frozen=True, kw_only=True)
class ModuleTraits:
    """Properties of a user's own module that a variant may not support."""

    has_decoder: bool = True
    by_hand: bool = False  # a decoder layer computes attention itself from the cache's keys and values
    softcap: bool = False  # scores are capped somewhere
    head_dim: int = 0
    value_dim: int = 0


class TracedCache(Cache):
    """A cache whose buffers are inputs and outputs of a graph."""

    past: Sequence[KeyValue]
    present: list[KeyValue]  # filled by `attend`


def supports_config(traits: TransformerConfig | ModuleTraits, precision: Precision) -> list[str]:
    """List what no variant supports; a user's own module is always supported."""
    return [] if isinstance(traits, ModuleTraits) else unsupported(traits, SUPPORTED)


@dataclass(frozen=True, kw_only=True)
class DecoderVariant:
    """A variant of the decoder: its cache and its attention."""

    supports: Callable[[TransformerConfig | ModuleTraits, Precision], list[str]] = supports_config
    # Of the past of every layer, the new tokens, and the other inputs of the variant by their names in the contract.
    cache: Callable[..., TracedCache | ConcatCache]
    cross: Callable[[Sequence[KeyValue], Tensor], Cross] = Cross
    source: Callable[[Tensor], Source] = Source  # self-attention of the encoder from the mask
    whole_source: Callable[[Tensor], Source] = Source  # the same, if all sources have the same length
    encoder: str = ENCODER
    opset: int | None = None  # None if the export chooses it
    portable: bool = True  # whether other runtimes than ONNX Runtime can run it
    passes: tuple[Callable[[ir.Model], None], ...] = ()


# The eager computation, traced without changes. Every ONNX runtime can run it.
CONCAT = DecoderVariant(cache=ConcatCache)


def unsupported(config: TransformerConfig, supported: Supported) -> list[str]:
    """List the fields of a configuration whose values are not supported."""
    return [
        f"{path} is {value}"
        for path, value in _fields(config)
        if (values := supported.get(path.rpartition(".")[2], ())) is not None and value not in values
    ]


def _fields(config: TransformerConfig | StackConfig, prefix: str = "") -> Iterator[tuple[str, object]]:
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, StackConfig):
            yield from _fields(value, f"{field.name}.")
        elif value is not None or field.name != "decoder":
            yield prefix + field.name, value
