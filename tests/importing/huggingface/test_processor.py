"""Settings of Hugging Face processors, converted or refused, and compared with transformers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import (
    Speech2TextFeatureExtractor,
    ViTImageProcessorPil,
    Wav2Vec2FeatureExtractor,
    WhisperFeatureExtractor,
)

from tfexport.contract import ModelSpec, TokenIds
from tfexport.errors import CheckpointError, ParityError
from tfexport.features.config import AudioConfig, ImageConfig
from tfexport.importing.huggingface.processor import directory_processor, read_processor
from tfexport.sources import FeatureSource, ImageSource

VIT = {"image_processor_type": "ViTImageProcessor"}
WHISPER = {"feature_extractor_type": "WhisperFeatureExtractor"}


def test_old_names_and_sizes_of_trocr() -> None:
    old = {"feature_extractor_type": "DeiTFeatureExtractor", "size": 384, "do_center_crop": False, "image_mean": 0.5}
    assert read_processor(old) == ImageConfig(height=384, width=384, resample="bicubic")
    fast = {"image_processor_type": "ViTImageProcessorFast", "size": {"height": 384, "width": 384}, "crop_size": None}
    assert read_processor({"image_processor": fast}) == ImageConfig(height=384, width=384)


def test_defaults_of_transformers() -> None:
    log_mel = AudioConfig(kind="log_mel", feature_dim=80, num_frames=3000, max_seconds=30)
    assert read_processor(WHISPER) == log_mel
    assert read_processor({"feature_extractor": {**WHISPER, "mel_filters": [[0.0]]}}) == log_mel
    assert read_processor(log_mel.to_dict() | WHISPER) == log_mel


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        ({}, 1),
        ({"feature_extractor_type": "ClapFeatureExtractor"}, 1),
        ({**WHISPER, "dither": 1e-4, "padding_side": "left", "sampling_rate": 8000, "padding_value": 1.0}, 4),
        ({**WHISPER, "chunk_length": "30"}, 1),
        ({**WHISPER, "feature_size": "80", "hop_length": 0.5}, 2),
        ({**WHISPER, "hop_length": 161}, 1),
        ({"feature_extractor_type": "Speech2TextFeatureExtractor", "sampling_rate": 8000, "num_mel_bins": 0}, 2),
        ({"feature_extractor_type": "Wav2Vec2FeatureExtractor", "feature_size": 2}, 1),
        ({"feature_extractor_type": "Wav2Vec2FeatureExtractor", "feature_size": "1", "do_normalize": 1}, 2),
        ({**VIT, "size": {"shortest_edge": 224}, "do_pad": True, "resample": 0, "do_center_crop": True}, 4),
        ({**VIT, "do_resize": False, "rescale_factor": 0, "image_mean": [0.5], "image_std": 0}, 4),
        ({**VIT, "image_processor_type": "DeiTImageProcessor"}, 1),
    ],
)
def test_what_cannot_be_reproduced_is_refused_at_once(settings: dict[str, object], count: int) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_processor(settings)
    assert len(caught.value.problems) == count, caught.value.problems


SHORT = FeatureSource(dim=80, frames=100)


def spec(source: FeatureSource | ImageSource) -> ModelSpec:
    """Return a specification of an encoder that reads `source`."""
    kind: Any = {"features" if isinstance(source, FeatureSource) else "image": source}
    tokens = TokenIds(pad=0, start=0, eos=0)
    return ModelSpec(d_model=8, max_source_length=2000, tokens=tokens, precision="fp32", **kind)


@pytest.mark.parametrize(
    ("theirs", "source"),
    [
        (WhisperFeatureExtractor(chunk_length=1), SHORT),
        (Speech2TextFeatureExtractor(), FeatureSource(dim=80)),
        (Wav2Vec2FeatureExtractor(), FeatureSource(dim=1)),
        (ViTImageProcessorPil(size=32), ImageSource(channels=3, height=32, width=32, positions=4)),
    ],
)
@pytest.mark.parametrize("is_nested", [False, True])
def test_a_processor_is_compared(theirs: Any, source: FeatureSource, is_nested: bool, tmp_path: Path) -> None:
    theirs.save_pretrained(tmp_path)
    if is_nested:  # as transformers 5 saves processors
        file = tmp_path / "preprocessor_config.json"
        kind = "feature_extractor" if isinstance(source, FeatureSource) else "image_processor"
        (tmp_path / "processor_config.json").write_text(json.dumps({kind: json.loads(file.read_text())}))
        file.unlink()
    config, notes = directory_processor(tmp_path, spec(source), compare=True)
    assert config is not None
    assert config.compared is not None
    assert (config.audio or config.image) == read_processor(theirs.to_dict())
    assert config.compared.inputs >= 32
    assert config.compared.largest_error < 5e-5
    assert len(notes) == 1
    assert type(theirs).__name__ in notes[0]


def test_another_result_than_that_of_transformers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = WhisperFeatureExtractor(chunk_length=1)
    theirs.save_pretrained(tmp_path)
    run = WhisperFeatureExtractor.__call__

    def changed(*values: Any, **options: Any) -> dict[str, Any]:
        return {"input_features": run(*values, **options)["input_features"] + np.float32(2e-4)}

    monkeypatch.setattr(WhisperFeatureExtractor, "__call__", changed)
    with pytest.raises(ParityError):
        directory_processor(tmp_path, spec(SHORT), compare=True)


def test_a_processor_without_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    WhisperFeatureExtractor(chunk_length=1).save_pretrained(tmp_path)
    config, notes = directory_processor(tmp_path, spec(SHORT), compare=False)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert directory_processor(tmp_path, spec(SHORT), compare=True)[0] == config
    assert config is not None
    assert config.compared is None
    assert "not compared" in notes[0]


def test_a_processor_that_does_not_fit_is_not_used(tmp_path: Path) -> None:
    assert directory_processor(tmp_path, spec(SHORT), compare=True)[0] is None
    WhisperFeatureExtractor(chunk_length=1, feature_size=128).save_pretrained(tmp_path)
    config, notes = directory_processor(tmp_path, spec(SHORT), compare=True)
    assert config is None
    assert len(notes) == 1
