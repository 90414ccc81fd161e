"""Try a user's own module on a few tokens before it is traced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from tfexport.contract import ModelSpec
from tfexport.errors import GraphError, raise_all, raised_by
from tfexport.export.decoders import ModuleTraits
from tfexport.nn.cache import ConcatCache, Cross, KeyValue, Source
from tfexport.nn.config import TransformerConfig
from tfexport.nn.eager import EncoderDecoder
from tfexport.nn.transformer import Transformer
from tfexport.precision import FLOAT

# Different sizes, so that swapped dimensions are found.
_BATCH, _SOURCE_LEN, _PAST_LEN, _TARGET_LEN = 2, 5, 4, 3
_SUBJECT = "the module does not fit its spec"
T = TypeVar("T")


def traits_of(model: nn.Module, spec: ModelSpec) -> TransformerConfig | ModuleTraits:
    """Return the configuration of a model, or the traits of a user's own module.

    A module that is not a `Transformer` runs on a few tokens. GraphError: a method fails (with the line of the module's
    code), or shapes differ from `spec` (lists all of them).
    """
    if isinstance(model, Transformer):
        return model.config
    source_ids, mask = torch.zeros(_BATCH, _SOURCE_LEN, dtype=torch.int64), torch.ones(_BATCH, _SOURCE_LEN).bool()
    if not spec.has_decoder:
        states = _call("hidden_states", lambda: cast(Any, model).hidden_states(source_ids, mask))
        expected = [_BATCH, _SOURCE_LEN, spec.d_model]
        raise_all(
            GraphError,
            _SUBJECT,
            _shape_problems("hidden_states returns", states, expected, "batch, source_len, d_model"),
        )
        return ModuleTraits(has_decoder=False)
    module, softcaps, cache_softcaps = cast(EncoderDecoder, model), list[float](), list[float]()
    source = _recording(Source(mask), softcaps)
    pairs = _call("encode", lambda: module.encode(source_ids, source))
    raise_all(GraphError, _SUBJECT, _pair_problems(pairs, spec))
    target_ids = torch.zeros(_BATCH, _TARGET_LEN, dtype=torch.int64)
    cross, dtype = _recording(Cross(pairs, mask), softcaps), getattr(torch, FLOAT[spec.precision])
    rows, widths = (_BATCH, spec.cache_heads, _PAST_LEN), (spec.head_dim, spec.value_dim)
    past = KeyValue(*(torch.zeros(*rows, width, dtype=dtype) for width in widths))
    cache = _recording(ConcatCache([past] * spec.layers, target_ids), cache_softcaps)
    logits: object = _call("decode_step", lambda: module.decode_step(target_ids, cross, cache))
    problems = _shape_problems("decode_step returns", logits, [_BATCH, spec.vocab], "rows, vocab: of the last position")
    if len(cache.present) != spec.layers:
        problems.append(
            f"decode_step keeps {len(cache.present)} layers in the cache, the spec has {spec.layers}; "
            "call cache.attend once in each"
        )
    elif isinstance(logits, Tensor) and logits.dtype != torch.float32:
        problems.append(f"decode_step returns {logits.dtype}, expected torch.float32; end it with .float()")
    raise_all(GraphError, _SUBJECT, problems)
    return ModuleTraits(
        by_hand=len(cache_softcaps) < spec.layers,
        softcap=any((*softcaps, *cache_softcaps)),
        head_dim=spec.head_dim,
        value_dim=spec.value_dim,
    )


def _recording(attention: T, softcaps: list[float]) -> T:
    """Record the soft cap of every call of `attend`.

    A layer that computes attention itself does not call it.
    """
    attend = cast(Any, attention).attend

    def recorded(*inputs: Any, softcap: float = 0.0, **options: Any) -> Tensor:
        softcaps.append(softcap)
        return cast(Tensor, attend(*inputs, softcap=softcap, **options))

    cast(Any, attention).attend = recorded
    return attention


def _call(method: str, call: Callable[[], T]) -> T:
    try:
        with torch.no_grad():
            return call()
    except Exception as error:
        raise GraphError(
            f"{method}: {raised_by(error)}, called with {_BATCH} rows of {_SOURCE_LEN} source tokens, {_PAST_LEN} past "
            f"and {_TARGET_LEN} new target tokens; see docs/guides/your-own-module.md"
        ) from error


def _pair_problems(pairs: object, spec: ModelSpec) -> list[str]:
    if not isinstance(pairs, Sequence) or not all(isinstance(pair, KeyValue) for pair in pairs):
        return [f"encode returns {type(pairs).__name__}, expected a list of KeyValue, one for each decoder layer"]
    problems = []
    if len(pairs) != spec.layers:
        problems.append(f"encode returns {len(pairs)} layers, the spec has {spec.layers}")
    names, expected = "batch, kv_heads, source_len, width", [_BATCH, spec.cache_heads, _SOURCE_LEN]
    for pair in pairs[:1]:
        problems += _shape_problems("encode returns keys", pair.key, [*expected, spec.head_dim], names)
        problems += _shape_problems("encode returns values", pair.value, [*expected, spec.value_dim], names)
    return problems


def _shape_problems(subject: str, found: object, expected: list[int], names: str) -> list[str]:
    shape = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
    return [] if shape == expected else [f"{subject} {shape}, expected {expected}: {names}"]
