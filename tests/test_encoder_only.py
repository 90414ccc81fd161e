"""Encoder-only bundles: pooling."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tfexport
from tests import tiny
from tfexport.contract import Pooling
from tfexport.errors import ConfigError, InputError
from tfexport.export import export_bundle
from tfexport.export.config import ExportConfig
from tfexport.model.model import Model
from tfexport.nn.directory import save_model
from tfexport.nn.transformer import Transformer
from tfexport.runtime.eager import EagerSession


def rows_of(count: int = 20, seed: int = 0) -> list[list[int]]:
    """Draw rows of uneven length, up to the limit."""
    rng = np.random.default_rng(seed)
    return [rng.integers(1, tiny.VOCAB, length).tolist() for length in (1, 24, *rng.integers(1, 24, count - 2))]


def pooled(model: Transformer, ids: list[int], pooling: Pooling) -> np.ndarray:
    """Encode a row on its own and pool it with NumPy."""
    with torch.no_grad():
        states = model.hidden_states(torch.tensor([ids]), torch.ones(1, len(ids)).bool())[0].numpy()
    return {"mean": states.mean(0), "max": states.max(0), "cls": states[0]}[pooling]


@pytest.mark.parametrize("pooling", ["mean", "cls", "max"])
def test_embed_pools_each_text_as_declared(pooling: Pooling) -> None:
    config = replace(tiny.ENCODER_ALONE, pooling=pooling)
    wide, model = tiny.model(config), Model(EagerSession(tiny.model(config, dtype=torch.float32)), None)
    expected = np.array([pooled(wide, ids, pooling) for ids in rows_of()])
    for size in (1, 7):
        np.testing.assert_allclose(model.embed(rows_of(), normalize=False, batch_size=size), expected, atol=2e-5)
        other: Pooling = "cls" if pooling == "mean" else "mean"
        assert not np.allclose(model.embed(rows_of(), normalize=False, pooling=other), expected, atol=1e-2)
    np.testing.assert_allclose(np.linalg.norm(model.embed(rows_of()), axis=1), 1, rtol=1e-6)


def test_a_bundle_keeps_the_pooling_of_its_model(tmp_path: Path) -> None:
    save_model(tiny.model(replace(tiny.ENCODER_ALONE, pooling="max"), dtype=torch.float32), tmp_path / "model")
    export_bundle(str(tmp_path / "model"), tmp_path / "bundle", ExportConfig())
    with tfexport.load(tmp_path / "bundle") as model:
        assert model.spec.pooling == "max"
        np.testing.assert_array_equal(model.embed(rows_of(4)), model.embed(rows_of(4), pooling="max"))


@pytest.mark.parametrize("sources", [[[5], []], [[5], [-1]], [[5], [31]], [[5], [1] * 25], [[5], [True]], [[5], "w"]])
def test_every_wrong_row_is_named(sources: Any) -> None:
    model = Model(EagerSession(tiny.model(tiny.ENCODER_ALONE, dtype=torch.float32)), None)
    with pytest.raises(InputError) as caught:
        model.embed(sources)
    assert caught.value.indices == (() if sources[1] == "w" else (1,))
    with pytest.raises(ConfigError):
        model.embed([[5]], pooling="median")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="pooling"):
        replace(tiny.config(), pooling="max")
