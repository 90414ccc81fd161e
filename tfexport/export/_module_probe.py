"""Try a user's own module on a few tokens before it is traced."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from tfexport.contract import ModelSpec
from tfexport.errors import GraphError, ParityError, raise_all, raised_by
from tfexport.export.decoders import ModuleTraits
from tfexport.nn.cache import ConcatCache, Cross, KeyValue, Source, StateCache, empty_buffers, empty_cache, paired
from tfexport.nn.config import TransformerConfig
from tfexport.nn.eager import EagerModel, EncoderDecoder
from tfexport.nn.source import encoder_inputs, position_mask
from tfexport.nn.transformer import Transformer
from tfexport.precision import FLOAT
from tfexport.runtime.sources import Sources, pad_sources, random_source
from tfexport.sources import TokenSource

# Different sizes, so that swapped dimensions are found.
_BATCH, _SOURCE_LEN, _PAST_LEN, _TARGET_LEN = 2, 5, 4, 3
_SUBJECT = "the module does not fit its spec"
_ENCODE, _STEP = "encode({}, source)", "decode_step(target_ids, cross, cache)"
_FRAMES = "masks are True for frames, and others must be 0 before each convolution"
_STATES, _REFERENCE = "hidden_states({}, mask)", "reference(module, {}, mask, target_ids)"
T = TypeVar("T")


def traits_of(model: nn.Module, spec: ModelSpec) -> TransformerConfig | ModuleTraits:
    """Return a model's configuration, or the traits of a user's module that is tried."""
    if isinstance(model, Transformer):
        return model.config
    kind, rng = spec.source, np.random.default_rng(0)
    sources = pad_sources(kind, [random_source(kind, rng, min(_SOURCE_LEN, spec.max_source_length))] * _BATCH)
    name, (x, mask) = next(iter(kind.inputs)), _tensors(sources)
    if not spec.has_decoder:
        states = _call(_STATES.format(name), cast(Any, model).hidden_states, x, mask)
        expected, names = [_BATCH, sources.source_len, spec.d_model], "batch, source_len, d_model"
        raise_all(GraphError, _SUBJECT, _shape_problems("hidden_states returns", states, expected, names))
        return ModuleTraits(has_decoder=False)
    module, softcaps, cache_softcaps = cast(EncoderDecoder, model), list[float](), list[float]()
    source = _recording(Source(mask), softcaps)
    pairs = _call(_ENCODE.format(name), module.encode, x, source)
    raise_all(GraphError, _SUBJECT, _pair_problems(pairs, spec, sources.source_len))
    target_ids = torch.zeros(_BATCH, _TARGET_LEN, dtype=torch.int64)
    cross, dtype = (
        _recording(Cross(pairs, torch.from_numpy(sources.mask)), softcaps),
        getattr(torch, FLOAT[spec.precision]),
    )
    past = empty_buffers(spec.cache, _BATCH, _PAST_LEN, torch.zeros(0, dtype=dtype))
    cache: Any = StateCache(past, target_ids, torch.full((_BATCH,), _PAST_LEN))
    if spec.cache.grows:
        cache = _recording(ConcatCache(paired(past), target_ids), cache_softcaps)
    logits: object = _call(_STEP, module.decode_step, target_ids, cross, cache)
    problems = _shape_problems("decode_step returns", logits, [_BATCH, spec.vocab], "rows, vocab: of the last position")
    if len(cache.present) != spec.layers:
        problems.append(
            f"decode_step keeps {len(cache.present)} layers in the cache, the spec has {spec.layers}; "
            f"call cache.{'attend' if spec.cache.grows else 'recur'} once in each"
        )
    elif isinstance(logits, Tensor) and logits.dtype != torch.float32:
        problems.append(f"decode_step returns {logits.dtype}, expected torch.float32; end it with .float()")
    raise_all(GraphError, _SUBJECT, problems)
    return ModuleTraits(
        by_hand=spec.cache.grows and len(cache_softcaps) < spec.layers,
        softcap=any((*softcaps, *cache_softcaps)),
        head_dim=spec.head_dim,
        value_dim=spec.value_dim,
    )


def _recording(attention: T, softcaps: list[float]) -> T:
    """Record the soft cap of every `attend`, which attention by hand does not call."""
    attend = cast(Any, attention).attend

    def recorded(*inputs: Any, softcap: float = 0.0, **options: Any) -> Tensor:
        softcaps.append(softcap)
        return cast(Tensor, attend(*inputs, softcap=softcap, **options))

    cast(Any, attention).attend = recorded
    return attention


def check_module(model: EagerModel, spec: ModelSpec) -> None:
    """Compare a user's own module with its reference on two rows, alone and padded.

    The subject of the ParityError is the wrong method; other errors are those of `traits_of`.
    """
    traits_of(model.module, replace(spec, precision="fp32"))
    functions, kind, rng = _functions(model, spec), spec.source, np.random.default_rng(0)
    values = [random_source(kind, rng, min(length, spec.max_source_length)) for length in (7, 4)]
    targets = []
    if spec.has_decoder:
        targets = [_draw(spec, min(4, spec.max_target_length))]
        targets[0][:, 0] = spec.tokens.start
    both = (*_tensors(pad_sources(kind, values)), *targets)
    one, other = ((*_tensors(pad_sources(kind, [values[row]])), *(x[row, None] for x in targets)) for row in (0, 1))
    expected = functions["reference"](*one)
    if model.generate is not None:
        model.generate(values[0], 1)  # to raise its errors before the model is traced
    for method, function in functions.items():
        together, alone = function(*both), torch.cat([function(*one), function(*other)])
        problem = "two runs differ; disable dropout, and change neither weights nor state"
        _same(method, problem, function(*both), together, tolerance=1e-6)
        if method in ("decode_step", "hidden_states"):
            problem = "one row without padding differs from the reference; compare layer by layer, and keep no state"
            _same(method, problem, alone[:1], expected)
        if method == "decode_step":
            problem = "token by token differs from all at once; use cache.positions, and cache.attend or cache.update"
            _same(method, problem, function(*one, 1), expected)
        remedy = "masks are True for tokens" if isinstance(kind, TokenSource) else _FRAMES
        _same(method, f"the result changes with padding or other rows; {remedy}", together, alone)


def _functions(model: EagerModel, spec: ModelSpec) -> dict[str, Callable[..., Tensor]]:
    """Return the reference and the methods as functions of ids, mask and target ids."""
    module, place, kind = cast(Any, model.module), -1 if spec.has_decoder else 0, spec.source
    encoding, states, outputs_of = (text.format(next(iter(kind.inputs))) for text in (_ENCODE, _STATES, _REFERENCE))

    def reference(*inputs: Tensor) -> Tensor:
        outputs = _call(outputs_of, model.reference, module, *inputs)
        shape = inputs[2].shape if spec.has_decoder else position_mask(kind, inputs[1]).shape
        expected = [*shape, spec.vocab or spec.d_model]
        names = "batch, target_len, vocab" if spec.has_decoder else "batch, source_len, d_model"
        raise_all(GraphError, _SUBJECT, _shape_problems("reference returns", outputs, expected, names))
        return outputs[:, place].float()

    def encode(x: Tensor, mask: Tensor, *_: Tensor) -> Tensor:
        pairs, kept = _call(encoding, module.encode, x, Source(mask)), position_mask(kind, mask)
        return torch.cat([part.transpose(1, 2)[kept].flatten(1) for p in pairs for part in (p.key, p.value)], 1)

    def decode(x: Tensor, mask: Tensor, target_ids: Tensor, step: int = 8) -> Tensor:
        pairs, logits = _call(encoding, module.encode, x, Source(mask)), torch.empty(0)
        cross_mask = position_mask(kind, mask)
        encode(x.flip(1), mask.flip(1))  # has no effect unless the module keeps state
        cache = None
        for part in torch.split(target_ids, step, 1):
            cache = cache.following(part) if cache else empty_cache(spec.cache, part, pairs[0].key)
            logits = _call(_STEP, module.decode_step, part, Cross(pairs, cross_mask), cache)
        return logits

    if spec.has_decoder:
        return {"reference": reference, "encode": encode, "decode_step": decode}
    return {"reference": reference, "hidden_states": lambda *x: _call(states, module.hidden_states, *x)[:, 0]}


def _tensors(sources: Sources) -> tuple[Tensor, Tensor]:
    return encoder_inputs(sources.kind, [torch.from_numpy(array) for array in sources.inputs.values()])


def _draw(spec: ModelSpec, length: int) -> Tensor:
    """Return two rows of target ids without special tokens."""
    special = asdict(spec.tokens).values()
    ordinary = [token for token in range(spec.vocab) if token not in special] or [spec.tokens.eos]
    return torch.tensor([ordinary[5 * n % len(ordinary)] for n in range(2 * length)]).view(2, length)


def _same(method: str, problem: str, found: Tensor, expected: Tensor, tolerance: float = 1e-3) -> None:
    difference = (found.nan_to_num() - expected.nan_to_num()).abs().max() if found.shape == expected.shape else math.inf
    if (error := float(difference / expected.nan_to_num().abs().max().clamp(min=1e-30))) > tolerance:
        raise ParityError(f"{problem}; the error is {error:.1e}", subject=method)


def _call(signature: str, function: Callable[..., T], *arguments: Any) -> T:
    """Call a function of the user on copies of tensors, which it must not change."""
    method, copies = signature.partition("(")[0], [x.clone() if isinstance(x, Tensor) else x for x in arguments]
    try:
        with torch.no_grad():
            result = function(*copies)
    except Exception as error:
        shapes = ", ".join(str(list(x.shape)) for x in arguments if isinstance(x, Tensor))
        problem = f"{raised_by(error)}, called as {signature} with shapes {shapes}"
        raise GraphError(problem, subject=method, remedy="see docs/guides/your-own-module.md") from error
    if any(isinstance(x, Tensor) and not torch.equal(x, copy) for x, copy in zip(arguments, copies, strict=True)):
        raise GraphError("changes its arguments in place", subject=method, remedy="clone them first")
    return result


def _pair_problems(pairs: object, spec: ModelSpec, source_len: int) -> list[str]:
    if not isinstance(pairs, Sequence) or not all(isinstance(pair, KeyValue) for pair in pairs):
        inner = f" of {type(pairs[0]).__name__}" if isinstance(pairs, Sequence) else ""
        return [
            f"encode returns {type(pairs).__name__}{inner}, expected a list of KeyValue, one for each decoder layer"
        ]
    problems = []
    if len(pairs) != spec.layers:
        problems.append(f"encode returns {len(pairs)} layers, the spec has {spec.layers}")
    names, expected = "batch, kv_heads, source_len, width", [_BATCH, spec.cache_heads, source_len]
    for pair in pairs[:1]:
        problems += _shape_problems("encode returns keys", pair.key, [*expected, spec.head_dim], names)
        problems += _shape_problems("encode returns values", pair.value, [*expected, spec.value_dim], names)
    return problems


def _shape_problems(subject: str, found: object, expected: list[int], names: str) -> list[str]:
    shape = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
    return [] if shape == expected else [f"{subject} {shape}, expected {expected}: {names}"]
