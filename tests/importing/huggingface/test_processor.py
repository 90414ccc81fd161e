"""Settings of Hugging Face processors, converted or refused."""

from __future__ import annotations

import pytest

from tfexport.errors import CheckpointError
from tfexport.features.config import AudioConfig, ImageConfig
from tfexport.importing.huggingface.processor import read_processor

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
