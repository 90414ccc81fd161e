"""A module with a mistake ends with one line that names the method; nothing is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.stranger import modern, senses
from tfexport.contract import ModelSpec
from tfexport.errors import GraphError, ParityError, TfexportError
from tfexport.export import export_module
from tfexport.export.config import ExportConfig
from tfexport.importing.own_module import OwnModule
from tfexport.nn.cache import ConcatCache, KeyValue, Source
from tfexport.sources import Convolution

HEADS, WIDTH = modern.KV_HEADS, modern.WIDTH


def pairs(change: Callable[[Tensor], Tensor]) -> Callable[..., list[KeyValue]]:
    return lambda inner, *inputs: [KeyValue(change(pair.key), change(pair.value)) for pair in inner(*inputs)]


def masked(change: Callable[[Tensor], Tensor]) -> Callable[..., list[KeyValue]]:
    return lambda inner, ids, source: inner(ids, Source(change(source.mask)))


def logits(change: Callable[[Tensor], object]) -> Callable[..., object]:
    return lambda inner, *inputs: change(inner(*inputs))


def stored(change: Callable[[KeyValue], object]) -> Callable[..., Tensor]:
    def step(inner: Any, ids: Tensor, cross: Any, cache: ConcatCache) -> Any:
        update: Any = cache.update
        cache.update = lambda layer, new: update(layer, change(new))  # type: ignore[method-assign]
        return inner(ids, cross, cache)

    return step


def cached(name: str, change: Callable[[ConcatCache, int], Tensor]) -> Callable[..., object]:
    def step(inner: Any, ids: Tensor, cross: Any, cache: ConcatCache) -> Any:
        setattr(cache, name, change(cache, ids.shape[1]))
        return inner(ids, cross, cache)

    return step


def past_hidden(cache: ConcatCache, new: int) -> Tensor:
    return cache.mask & (torch.arange(cache.key_len) >= cache.key_len - new)


def with_ids(change: Callable[[Tensor], Tensor]) -> Callable[..., object]:
    return lambda inner, ids, *inputs: inner(change(ids), *inputs)


def weights_changed(inner: Any, *inputs: Any) -> Any:
    inner.__self__.tokens.weight.data.mul_(1.01)
    return inner(*inputs)


REFERENCES: dict[str, Callable[..., object]] = {
    "tuple": lambda model, *inputs: (model(*inputs), None),
    "last position": lambda model, *inputs: model(*inputs)[:, -1],
    "batch second": lambda model, *inputs: model(*inputs).transpose(0, 1),
    "mask inverted": lambda model, ids, mask, target: model(ids, ~mask, target),
    "arguments": lambda model, ids, target: model(ids, ids > 0, target),
    "random": lambda model, *inputs: F.dropout(model(*inputs), 0.1),
    "in place": lambda model, ids, *inputs: model(ids.clamp_(max=9), *inputs),
}
# The method, its class of error, and what is wrong with it.
MISTAKES: dict[str, tuple[str, type[TfexportError], Callable[..., object]]] = {
    "encode arguments": ("encode", GraphError, lambda inner, ids: inner(ids)),
    "encode states": ("encode", GraphError, lambda inner, ids, source: inner.__self__.tokens(ids)),
    "encode tuples": ("encode", GraphError, lambda inner, *inputs: [(pair.key, pair.value) for pair in inner(*inputs)]),
    "encode nothing": ("encode", GraphError, lambda inner, *inputs: []),
    "encode order": ("encode", GraphError, pairs(lambda x: x.transpose(1, 2))),
    "encode rank": ("encode", GraphError, pairs(lambda x: x.flatten(2))),
    "encode one row only": ("encode", GraphError, pairs(lambda x: x.reshape(1, HEADS, -1, WIDTH))),
    "encode first row": ("encode", ParityError, pairs(lambda x: x[:1].expand(len(x), -1, -1, -1))),
    "encode length baked in": ("encode", GraphError, pairs(lambda x: x.reshape(-1, HEADS, 5, WIDTH))),
    "encode mask inverted": ("encode", ParityError, masked(lambda mask: ~mask)),
    "encode mask ignored": ("encode", ParityError, masked(torch.ones_like)),
    "encode additive mask": ("encode", GraphError, masked(lambda mask: torch.where(mask, 0.0, -1e9))),
    "encode in place": ("encode", GraphError, with_ids(lambda ids: ids.clamp_(max=3))),
    "encode dropout": ("encode", ParityError, pairs(lambda x: F.dropout(x, 0.1))),
    "encode branch": ("encode", GraphError, with_ids(lambda ids: ids + 0 if (ids == 7).any() else ids)),
    "encode loop": (
        "encode",
        GraphError,
        with_ids(lambda ids: torch.cat([*ids.split(1, 1)], 1)),
    ),
    "step arguments": ("decode_step", GraphError, lambda inner, ids, cache: inner(ids, None, cache)),
    "step fails": ("decode_step", GraphError, lambda inner, *inputs: None.forward(inputs)),  # type: ignore[attr-defined]
    "step tuple": ("decode_step", GraphError, logits(lambda x: (x, None))),
    "step all positions": ("decode_step", GraphError, logits(lambda x: x[:, None].expand(-1, 3, -1))),
    "step batch second": ("decode_step", GraphError, logits(Tensor.t)),
    "step wrong position": ("decode_step", ParityError, with_ids(lambda ids: ids.roll(1, 1))),
    "step vocabulary": ("decode_step", GraphError, logits(lambda x: x[:, :-1])),
    "step float64": ("decode_step", GraphError, logits(Tensor.double)),
    "step dropout": ("decode_step", ParityError, logits(lambda x: F.dropout(x, 0.1))),
    "step NaN": ("decode_step", ParityError, logits(lambda x: x * torch.nan)),
    "step positions restarted": (
        "decode_step",
        ParityError,
        cached("positions", lambda _, n: torch.arange(n)[None]),
    ),
    "step past ignored": ("decode_step", ParityError, cached("mask", past_hidden)),
    "step stores nothing": ("decode_step", GraphError, lambda inner, ids, *_: torch.zeros(len(ids), modern.VOCAB)),
    "step cache order": ("decode_step", GraphError, stored(lambda x: KeyValue(x.key.mT, x.value.mT))),
    "step cache rank": ("decode_step", GraphError, stored(lambda x: KeyValue(x.key.flatten(2), x.value.flatten(2)))),
    "step cache tuple": ("decode_step", GraphError, stored(lambda x: (x.key, x.value))),
    "step weights in place": ("decode_step", ParityError, weights_changed),
}


def refused(tmp_path: Path, model: Any, spec: ModelSpec = modern.SPEC, reference: Any = None) -> TfexportError:
    with pytest.raises(TfexportError) as caught:
        export_module(OwnModule(model, spec, reference), tmp_path / "bundle", ExportConfig(variants=("concat",)))
    assert not list(tmp_path.iterdir())
    assert str(caught.value).isprintable()
    return caught.value


def names(error: TfexportError, method: str) -> bool:
    return error.subject.startswith(method) or all(problem.startswith(method) for problem in error.problems)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_names_the_method(mistake: str, tmp_path: Path) -> None:
    method, kind, change = MISTAKES[mistake]
    model = modern.module()
    inner = getattr(model, method)
    setattr(model, method, lambda *inputs: change(inner, *inputs))
    error = refused(tmp_path, model)
    assert type(error) is kind
    assert names(error, method), str(error)


@pytest.mark.parametrize("mistake", REFERENCES)
def test_a_mistake_in_the_reference_names_it(mistake: str, tmp_path: Path) -> None:
    error = refused(tmp_path, modern.module(), reference=REFERENCES[mistake])
    assert names(error, "reference"), str(error)


@pytest.mark.parametrize("change", [{"kv_heads": None}, {"layers": 3}, {"value_dim": 8}])
def test_a_specification_of_another_module_names_the_method(change: dict[str, Any], tmp_path: Path) -> None:
    error = refused(tmp_path, modern.module(), replace(modern.SPEC, **change))
    assert isinstance(error, GraphError)
    assert names(error, "encode")


def test_state_that_is_kept_between_calls(tmp_path: Path) -> None:
    model: Any = modern.module()
    encode, step, kept = model.encode, model.decode_step, []
    model.encode = lambda *inputs: kept.append(encode(*inputs)) or kept[-1]
    model.decode_step = lambda ids, cross, cache: step(ids, type(cross)(kept[-1], cross.mask), cache)
    assert names(refused(tmp_path, model), "decode_step")


@pytest.mark.parametrize("method", ["reference", "encode"])
def test_convolutions_over_padded_frames_name_the_method(method: str, tmp_path: Path) -> None:
    model: Any = senses.make().module
    front = model.front

    def unmasked(inner: Any) -> Callable[..., Any]:
        """Read every frame, and return the right mask of positions."""

        def call(*inputs: Any) -> Any:
            with patch.object(model, "front", lambda x, mask: (front(x, torch.ones_like(mask))[0], front(x, mask)[1])):
                return inner(*inputs)

        return call

    wrong = {"reference": "forward", "encode": "encode"}[method]
    setattr(model, wrong, unmasked(getattr(model, wrong)))
    error = refused(tmp_path, model, senses.make().spec)
    assert isinstance(error, ParityError)
    assert error.subject == method


@pytest.mark.parametrize("convolutions", [(), senses.SHORTER[:1], (Convolution(kernel=3, stride=4),)])
def test_other_convolutions_in_the_specification_name_the_method(
    convolutions: tuple[Convolution, ...], tmp_path: Path
) -> None:
    own = senses.make()
    features = replace(senses.KINDS["features"], convolutions=convolutions)
    error = refused(tmp_path, own.module, replace(own.spec, features=features))
    assert isinstance(error, GraphError)
    assert names(error, "encode")
