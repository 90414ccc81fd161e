"""A module whose methods do not fit its specification is told so in one line, before anything is traced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.stranger import modern
from tfexport.contract import ModelSpec
from tfexport.errors import GraphError
from tfexport.export.write import write_graphs


def written(change: Callable[[Any], Any], tmp_path: Path, spec: ModelSpec = modern.SPEC) -> str:
    """Return the error of an export of a module with something wrong in it."""
    model = modern.module().eval()
    change(model)
    with pytest.raises(GraphError) as caught:
        write_graphs(model, spec, tmp_path, variants=("concat",), opset=18)
    assert not list(tmp_path.iterdir())
    return str(caught.value)


def step(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[nn.Module], None]:
    def wrap(model: Any) -> None:
        inner = model.decode_step
        model.decode_step = lambda *inputs: change(inner(*inputs))

    return wrap


def test_wrong_shapes_are_named(tmp_path: Path) -> None:
    heads = written(lambda model: None, tmp_path, replace(modern.SPEC, kv_heads=None))
    assert "encode returns keys [2, 2, 5, 16], expected [2, 4, 5, 16]: batch, kv_heads, source_len, width" in heads
    layers = written(lambda model: None, tmp_path, replace(modern.SPEC, layers=3))
    assert layers == "the module does not fit its spec: encode returns 2 layers, the spec has 3"
    vocab = written(step(lambda logits: logits[:, None]), tmp_path)
    assert "decode_step returns [2, 1, 48], expected [2, 48]: rows, vocab: of the last position" in vocab
    narrow = written(step(lambda logits: logits.half()), tmp_path)
    assert "decode_step returns torch.float16, expected torch.float32; end it with .float()" in narrow


def test_a_layer_that_stores_nothing(tmp_path: Path) -> None:
    message = written(lambda model: setattr(model, "decoder", model.decoder[:1]), tmp_path)
    assert "encode returns 1 layers, the spec has 2" in message
    empty = written(lambda model: setattr(model, "encode", lambda *inputs: []), tmp_path)
    assert empty == "the module does not fit its spec: encode returns 0 layers, the spec has 2"
    bypassed = written(lambda model: setattr(model, "attend", lambda attention, x, *rest: x), tmp_path)
    assert "decode_step keeps 0 layers in the cache, the spec has 2; call cache.attend once in each" in bypassed


def test_a_method_that_fails_names_its_line(tmp_path: Path) -> None:
    message = written(lambda model: setattr(model, "norm", None), tmp_path)
    assert message.startswith("decode_step: TypeError: 'NoneType' object is not callable (modern.py line ")
    assert "called with 2 rows of 5 source tokens, 4 past and 3 new target tokens" in message
