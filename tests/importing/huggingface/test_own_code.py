"""Hugging Face directories are compared with transformers itself, and the status names it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers

from tests.command import ran
from tests.importing.huggingface import published
from tests.importing.huggingface.published import CONFIGS
from tfexport.bundle.bundle import open_bundle
from tfexport.describe import inspect_path
from tfexport.errors import CheckpointError, ParityError
from tfexport.importing.config import ImportConfig
from tfexport.importing.huggingface import families
from tfexport.importing.importer import import_checkpoint


def edit(folder: Path, **changes: Any) -> None:
    """Change config.json after the weights were written; None removes a key."""
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: v for key, v in config.items() if v is not None}))


def test_the_status_names_transformers_up_to_the_bundle(tmp_path: Path) -> None:
    published.write(tmp_path / "hf", "opus-mt")
    found = import_checkpoint(tmp_path / "hf", tmp_path / "model").certificate
    assert found.proof.status == "proven"
    assert found.author_version == f"transformers {transformers.__version__}"
    assert (found.source_tokens, found.target_tokens, found.unverified) == (24, 24, ())
    ran("onnx", tmp_path / "model", "--output", tmp_path / "bundle", "--variants", "concat")
    assert open_bundle(tmp_path / "bundle").manifest.proof == found.proof
    assert inspect_path(tmp_path / "model")["certificate"]["proof"] == found.proof.sentence


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("opus-mt", "norm_eps=1e-6"),
        ("opus-mt", "embedding_scale=1"),
        ("bart-base", "activation=gelu_tanh"),
        ("bart-base", "num_heads=2"),
        ("t5-small", "logit_scale=1"),
        ("t5-v1_1-base", "activation=gelu"),
        ("t5-v1_1-base", "relative_max_distance=127"),  # seen by the rows of 256 tokens only
        ("t5gemma-s-s", "attention_softcap=40"),
        ("t5gemma-s-s", "rotary_base=9000"),
    ],
)
def test_a_wrong_switch_ends_the_import(name: str, setting: str, tmp_path: Path) -> None:
    published.write(tmp_path / "hf", name)
    with pytest.raises(ParityError):
        import_checkpoint(tmp_path / "hf", tmp_path / "model", ImportConfig(settings=(setting,)))
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("key", "value", "weight"),
    [
        ("encoder_ffn_dim", 64, "encoder.layers.0.fc1"),
        ("vocab_size", 10**12, "model.shared"),
        ("d_model", 64, "model.shared"),
    ],
)
def test_a_config_of_other_shapes_is_refused_and_names_the_weights(
    key: str, value: int, weight: str, tmp_path: Path
) -> None:
    edit(published.write(tmp_path / "hf", "bart-base"), **{key: value})
    command = ("import", tmp_path / "hf", "--output", tmp_path / "model")
    assert weight in ran(*command, code=2).stderr
    assert "unproven" in ran(*command, "--no-compare").stdout


@pytest.mark.parametrize("version", ["4.57.6", "5.0.0", None])
def test_without_a_new_transformers_a_note_gives_the_reason(
    version: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published.write(tmp_path / "hf", "bart-base")
    old = SimpleNamespace(__version__=version, utils=transformers.utils)
    monkeypatch.setitem(sys.modules, "transformers", old if version else None)
    found = import_checkpoint(tmp_path / "hf", tmp_path / "model")
    assert found.certificate.proof.status == "unproven"
    (note,) = (note for note in found.notes if "not compared with transformers" in note)
    assert "pip install 'tfexport[hf]'" in note


@pytest.mark.parametrize(
    ("name", "key", "problem"),
    [
        ("bart-base", "decoder_layers", "layer 1 is missing"),
        ("blenderbot-400M-distill", "decoder_layers", "layer 1 is missing"),
        ("t5-small", "num_layers", "layer 2 is missing"),
    ],
)
def test_a_missing_number_of_layers_is_that_of_transformers(name: str, key: str, problem: str, tmp_path: Path) -> None:
    edit(published.write(tmp_path / "hf", name), **{key: None})
    with pytest.raises(CheckpointError) as caught:
        import_checkpoint(tmp_path / "hf", tmp_path / "model")
    assert any(key in one and "by default" in one and problem in one for one in caught.value.problems)


@pytest.mark.parametrize(
    "name", ["bart-base", "plbart-base", "m2m100_418M", "blenderbot-400M-distill", "t5-small", "mt5-small"]
)
def test_defaults_are_those_of_transformers(name: str) -> None:
    family = families()[CONFIGS[name]["model_type"]]
    config = getattr(transformers, published.CLASSES[family.model_type]).config_class()
    assert {key: getattr(config, key) for key in family.defaults} == dict(family.defaults)
