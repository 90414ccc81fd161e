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
T = TypeVar("T")


def traits_of(model: nn.Module, spec: ModelSpec) -> TransformerConfig | ModuleTraits:
    """Return the configuration of a model, or the traits of a user's own module.

    A module that is not a `Transformer` is run on a few tokens. It is in eval mode, in the precision of `spec`.

    Raises:
        GraphError: a method fails (the message has the line of the module's code), or shapes differ from `spec` (lists
            all of them).
    """
    if isinstance(model, Transformer):
        return model.config
    source_ids, mask = torch.zeros(_BATCH, _SOURCE_LEN, dtype=torch.int64), torch.ones(_BATCH, _SOURCE_LEN).bool()
    if not spec.has_decoder:
        states = _called("hidden_states", lambda: cast(Any, model).hidden_states(source_ids, mask))
        wanted = [_BATCH, _SOURCE_LEN, spec.d_model]
        _raise(_shape_problems("hidden_states returns", states, wanted, "batch, source_len, d_model"))
        return ModuleTraits(has_decoder=False)
    module, source = cast(EncoderDecoder, model), _WatchedSource(mask)
    pairs = _called("encode", lambda: module.encode(source_ids, source))
    _raise(_pair_problems(pairs, spec))
    cross, cache = _WatchedCross(pairs, mask), _WatchedCache.with_past(spec)
    target_ids = torch.zeros(_BATCH, _TARGET_LEN, dtype=torch.int64)
    logits: object = _called("decode_step", lambda: module.decode_step(target_ids, cross, cache))
    problems = _shape_problems("decode_step returns", logits, [_BATCH, spec.vocab], "rows, vocab: of the last position")
    if len(cache.present) != spec.layers:
        problems.append(
            f"decode_step keeps {len(cache.present)} layers in the cache, the spec has {spec.layers}; "
            "call cache.attend once in each"
        )
    elif isinstance(logits, Tensor) and logits.dtype != torch.float32:
        problems.append(f"decode_step returns {logits.dtype}, expected torch.float32; end it with .float()")
    _raise(problems)
    return ModuleTraits(
        by_hand=len(cache.softcaps) < spec.layers,
        softcap=any((*source.softcaps, *cross.softcaps, *cache.softcaps)),
        head_dim=spec.head_dim,
        value_dim=spec.value_dim,
    )


class _Watched:
    """Record the soft cap of every call of `attend`.

    A layer that computes attention itself does not call it.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.softcaps: list[float] = []

    def attend(self, *inputs: Any, softcap: float = 0.0, **options: Any) -> Tensor:
        self.softcaps.append(softcap)
        return cast(Tensor, super().attend(*inputs, softcap=softcap, **options))  # type: ignore[misc]


class _WatchedSource(_Watched, Source): ...


class _WatchedCross(_Watched, Cross): ...


class _WatchedCache(_Watched, ConcatCache):
    @classmethod
    def with_past(cls, spec: ModelSpec) -> _WatchedCache:
        rows, dtype = (_BATCH, spec.cache_heads, _PAST_LEN), getattr(torch, FLOAT[spec.precision])
        past = KeyValue(*(torch.zeros(*rows, width, dtype=dtype) for width in (spec.head_dim, spec.value_dim)))
        return cls([past] * spec.layers, torch.zeros(_BATCH, _TARGET_LEN, dtype=torch.int64))


def _called(method: str, call: Callable[[], T]) -> T:
    try:
        with torch.no_grad():
            return call()
    except Exception as error:
        raise GraphError(
            f"{method}: {raised_by(error)}, called with {_BATCH} rows of {_SOURCE_LEN} source and {_TARGET_LEN} new "
            f"target tokens behind {_PAST_LEN}; see docs/guides/your-own-module.md"
        ) from error


def _pair_problems(pairs: object, spec: ModelSpec) -> list[str]:
    if not isinstance(pairs, Sequence) or not all(isinstance(pair, KeyValue) for pair in pairs):
        return [f"encode returns {type(pairs).__name__}, expected a list of KeyValue, one for each decoder layer"]
    problems = []
    if len(pairs) != spec.layers:
        problems.append(f"encode returns {len(pairs)} layers, the spec has {spec.layers}")
    wanted = [_BATCH, spec.cache_heads, _SOURCE_LEN]
    for name, tensor, width in (("keys", pairs[0].key, spec.head_dim), ("values", pairs[0].value, spec.value_dim)):
        problems += _shape_problems(
            f"encode returns {name}", tensor, [*wanted, width], "batch, kv_heads, source_len, width"
        )
    return problems


def _shape_problems(what: str, found: object, wanted: list[int], names: str) -> list[str]:
    shape = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
    return [] if shape == wanted else [f"{what} {shape}, expected {wanted}: {names}"]


def _raise(problems: Sequence[str]) -> None:
    raise_all(GraphError, "the module does not fit its spec", problems)
