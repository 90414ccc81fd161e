"""What a form of the decoder graph consists of, and how it says what it can do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import onnx_ir as ir
from torch import Tensor

from tfexport.contract import ENCODER, Precision
from tfexport.nn.cache import Cache, Cross, KeyValue, Source
from tfexport.nn.config import StackConfig, TransformerConfig
from tfexport.nn.source import CrossCache, PaddedSource
from tfexport.nn.switches import SWITCHES

# The fields of a configuration that a form can do, and of each the values; None means every value.
Supported = Mapping[str, Collection[object] | None]

# What no attention sees: the switches that act elsewhere, sizes, ties, biases. A form adds what its attention can do.
OUTSIDE_ATTENTION: Supported = {
    **{
        name: switch.values if isinstance(switch.values, tuple) else None
        for name, switch in SWITCHES.items()
        if switch.acts not in ("attention", "cross-attention", "positions")
    },
    **dict.fromkeys(("d_model", "d_ff", "layers", "source_vocab", "target_vocab", "tokens", "dropout")),
    **dict.fromkeys(("max_source_length", "max_target_length", "tie_embeddings", "tie_output")),
    **dict.fromkeys(("feed_forward_bias", "norm_bias", "output_bias")),
}


@dataclass(frozen=True, kw_only=True)
class Seam:
    """What a module of the user's own asks of attention, as far as a form may not have it.

    Attributes:
        has_decoder: False for an encoder alone.
        by_hand: a layer of the decoder attends in its own way to what the cache keeps.
        softcap: scores level off somewhere.
        head_dim: width of one head's keys.
        value_dim: width of one head's values.
    """

    has_decoder: bool = True
    by_hand: bool = False
    softcap: bool = False
    head_dim: int = 0
    value_dim: int = 0


class TracedCache(Cache, Protocol):
    """A cache whose buffers go into a graph and come out of it.

    Attributes:
        present: one `KeyValue` a layer, complete when every layer has attended.
    """

    present: list[KeyValue]


@dataclass(frozen=True, kw_only=True)
class DecoderForm:
    """One form of the decoder: how it keeps its cache and attends.

    Attributes:
        supports: says what of a model the form cannot do, given the
            configuration, or what a module of the user's own asks for, and the precision.
        cache: of the decoder's self-attention, from the past of every layer, the new tokens and, by its name in the
            contract, what else the form has for an input.
        cross: of its attention to the source, from what the encoder returned and the mask.
        source: of the encoder's self-attention, from the mask.
        encoder: name of the encoder graph that belongs to the form.
        opset: the one it needs; None where the export may choose.
        portable: whether other runtimes than ONNX Runtime are to read it.
        passes: over the traced decoder, which they change in place.
    """

    supports: Callable[[TransformerConfig | Seam, Precision], list[str]]
    cache: Callable[..., TracedCache]
    cross: Callable[[Sequence[KeyValue], Tensor], Cross] = CrossCache
    source: Callable[[Tensor], Source] = PaddedSource
    encoder: str = ENCODER
    opset: int | None = None
    portable: bool = True
    passes: tuple[Callable[[ir.Model], None], ...] = ()


def unsupported(config: TransformerConfig, supported: Supported) -> list[str]:
    """Name the fields and the values that a form does not list: what it was never taught it does not do."""
    problems = []
    for path, value in _fields(config):
        name = path.rpartition(".")[2]
        values = supported.get(name, ())
        if values is not None and value not in values:
            problems.append(f"{path} is {value}")
    return problems


def _fields(config: TransformerConfig | StackConfig, prefix: str = "") -> Iterator[tuple[str, object]]:
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, StackConfig):
            yield from _fields(value, f"{field.name}.")
        elif value is not None or field.name != "decoder":
            yield prefix + field.name, value
