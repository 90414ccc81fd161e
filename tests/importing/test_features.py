"""Import from-scratch models whose encoder reads features through convolutions."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import tfexport
from models.from_scratch.speech import Front, Speech
from tests.command import ran, run
from tfexport.errors import CheckpointError
from tfexport.nn.directory import load_model
from tfexport.runtime.eager import EagerSession
from tfexport.runtime.sources import pad_sources

DIM, VOCAB = 20, 40


def forward(model: nn.Module, features: Tensor, mask: Tensor, target_ids: Tensor) -> Tensor:
    logits: Tensor = model(features, mask, target_ids)
    return logits


def recorded(model: nn.Module, path: Path, **options: Any) -> Path:
    options = {"features": DIM, "target_vocab": VOCAB, "start": 1, "end": 2, "max_source_len": 128} | options
    tfexport.record_reference(model, forward, path / "reference.safetensors", max_target_len=32, force=True, **options)
    return path / "reference.safetensors"


def imported(model: nn.Module, path: Path, *options: object) -> Any:
    save_file(model.state_dict(), weights := path / "weights.safetensors")
    reference, given = recorded(model, path), ("--set", "tokens.pad=0", *options)
    return run("import", weights, "--reference", reference, "--output", path / "model", *given)


@pytest.mark.parametrize("front", get_args(Front))
def test_the_front_end_is_found_and_proven(front: Front, tmp_path: Path) -> None:
    torch.manual_seed(0)
    original = Speech(front).eval()
    result = imported(original, tmp_path)
    assert result.exit_code == 0, result.output
    assert "proven" in result.output
    session = EagerSession(load_model(tmp_path / "model"))
    rng = np.random.default_rng(0)
    sources = [rng.standard_normal((frames, DIM), np.float32) for frames in (31, 8, 100, 57)]
    batch, prompts = session.batch(), [[1, *rng.integers(3, VOCAB, 5).tolist()] for _ in sources]
    batch.add(pad_sources(session.spec.source, sources), prompts)
    found = batch.step(np.array([prompt[-1] for prompt in prompts]), VOCAB)
    for row, (source, prompt) in enumerate(zip(sources, prompts, strict=True)):
        mask = torch.ones(1, len(source), dtype=torch.bool)
        with torch.no_grad():
            expected = original(torch.from_numpy(source)[None], mask, torch.tensor([prompt]))[0, -1].numpy()
        np.testing.assert_allclose(found.logits[row], expected[found.token_ids[row]], atol=1e-4)


def test_the_layout_of_an_import_reads_the_next_checkpoint(tmp_path: Path) -> None:
    torch.manual_seed(1)
    assert imported(Speech("quartered"), tmp_path).exit_code == 0
    torch.manual_seed(2)
    save_file(Speech("quartered").state_dict(), other := tmp_path / "other.safetensors")
    ran("import", other, "--layout", tmp_path / "model" / "layout.yaml", "--output", tmp_path / "next")
    assert load_model(tmp_path / "next").config == load_model(tmp_path / "model").config


def test_without_reference_outputs_the_error_names_them(tmp_path: Path) -> None:
    save_file(Speech().state_dict(), weights := tmp_path / "weights.safetensors")
    result = ran("import", weights, "--output", tmp_path / "model", code=1)
    assert "--reference" in result.stderr


def test_what_cannot_be_recorded_is_refused(tmp_path: Path) -> None:
    model = Speech("halved").eval()
    for options in (
        {"features": None},
        {"source_vocab": 9},
        {"target_vocab": None},
        {"features": DIM + 1},
        {"encode": lambda model, features, mask: features},
    ):
        with pytest.raises(CheckpointError):
            recorded(model, tmp_path, **options)

    class Unmasked(Speech):
        def forward(self, features: Tensor, mask: Tensor, target_ids: Tensor) -> Tensor:
            return super().forward(features, torch.ones_like(mask), target_ids)

    with pytest.raises(CheckpointError, match="padding"):
        recorded(Unmasked("halved").eval(), tmp_path)
