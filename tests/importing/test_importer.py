"""Imports that a reference proves: what the file leaves out is found, what the search found is what is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tests import tiny
from tfexport.errors import CheckpointError
from tfexport.importing.config import ImportConfig
from tfexport.importing.importer import import_checkpoint
from tfexport.importing.reference.outputs import record_reference
from tfexport.nn.directory import load_model

VOCAB = 41
SIZES: dict[str, Any] = {"vocab_size": VOCAB, "d_model": 32, "max_position_embeddings": 24} | {
    f"{side}_{name}": value
    for side in ("encoder", "decoder")
    for name, value in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 64))
}
MARIAN = {"pad_token_id": 40, "decoder_start_token_id": 40, "eos_token_id": 0}


def forward(model: Any, source_ids: Tensor, source_mask: Tensor, target_ids: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=source_ids, attention_mask=source_mask.long(), decoder_input_ids=target_ids).logits
    return logits


def recorded(family: str, folder: Path, heads: int = 4, **settings: Any) -> Any:
    """Write a model as transformers does, which stores a tied tensor once, and a reference with all of its names."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **settings})
    kind = "MarianMTModel" if family == "Marian" else f"{family}ForConditionalGeneration"
    model = getattr(transformers, kind)(config).eval()
    tiny.randomise(model)
    model.tie_weights()
    model.save_pretrained(folder / "hf")
    pad = config.pad_token_id
    sizes = {"source_vocab": VOCAB, "target_vocab": VOCAB, "heads": heads}
    record_reference(model, forward, folder / "reference", **sizes, pad_source=pad, pad_target=pad)
    return model


@pytest.mark.parametrize(
    ("family", "settings", "builtin"),
    [("MBart", {}, True), ("M2M100", {}, True), ("Pegasus", {}, False), ("Marian", MARIAN, False)],
    ids=["mbart", "m2m100", "pegasus", "marian"],
)
def test_ties_that_a_file_stores_once_are_those_of_the_reference(
    family: str, settings: dict[str, Any], builtin: bool, tmp_path: Path
) -> None:
    model = recorded(family, tmp_path, **settings)
    weights, config = tmp_path / "hf" / "model.safetensors", ImportConfig(builtin=builtin)
    imported = import_checkpoint(weights, tmp_path / "model", config, reference=tmp_path / "reference")
    assert imported.certificate.proven
    assert imported.config.tie_embeddings
    assert imported.config.tie_output
    ours, batch = load_model(tmp_path / "model").double(), tiny.batch()
    with torch.no_grad():
        assert (ours(*batch) - forward(model.double(), *batch)).abs().max() < 1e-6


def test_found_settings_replace_those_of_a_layout(tmp_path: Path) -> None:
    """A Marian of transformers' defaults: embeddings not scaled, where the layout scales them, and GELU."""
    recorded("Marian", tmp_path, **MARIAN)
    lines: list[str] = []
    imported = import_checkpoint(
        tmp_path / "hf" / "model.safetensors", tmp_path / "model", reference=tmp_path / "reference", report=lines.append
    )
    assert "names fit the layout hf_marian" in lines
    assert imported.certificate.proven
    assert (imported.config.embedding_scale, imported.config.activation) == (1.0, "gelu")


def test_a_reference_proves_a_directory_of_an_unknown_family(tmp_path: Path) -> None:
    """The tokens are those of its config.json."""
    recorded("MBart", tmp_path)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps({**config, "model_type": "mine", "eos_token_id": 5}))
    (tmp_path / "hf" / "generation_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"model_type is 'mine', expected .* give --reference"):
        import_checkpoint(tmp_path / "hf", tmp_path / "model")
    imported = import_checkpoint(tmp_path / "hf", tmp_path / "model", reference=tmp_path / "reference")
    assert imported.certificate.proven
    assert imported.config.tokens.eos == 5


@pytest.mark.parametrize(
    ("family", "settings"),
    [("Bart", {"tie_word_embeddings": False}), ("Pegasus", {}), ("M2M100", {"d_model": 33})],
    ids=["bart", "pegasus", "m2m100"],
)
def test_a_directory_of_a_known_family_is_proven_too(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """Also where the state dict of the reference has a table that nothing reads, as BART's that ties nothing."""
    heads = {f"{side}_attention_heads": 3 for side in ("encoder", "decoder")} if settings.get("d_model") else {}
    recorded(family, tmp_path, heads=3 if heads else 4, **settings, **heads)
    imported = import_checkpoint(tmp_path / "hf", tmp_path / "model", reference=tmp_path / "reference")
    assert imported.certificate.proven
    assert imported.layout.name == f"hf_{'m2m_100' if family == 'M2M100' else family.lower()}"
