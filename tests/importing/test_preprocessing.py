"""Compare processors with the author's own preprocessing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tfexport.bundle.processor import ProcessorConfig
from tfexport.errors import BackendError, ParityError
from tfexport.features.config import AudioConfig, ImageConfig
from tfexport.importing.preprocessing import INPUTS, compare_processor

AUDIO = ProcessorConfig(
    audio=AudioConfig(kind="waveform", feature_dim=1, subtract_mean=True, divide_by_std=True, rate=8000)
)
IMAGE = ProcessorConfig(image=ImageConfig(height=32, width=24, resample="bicubic"))


def normalized(samples: NDArray[Any], rate: int | None) -> NDArray[Any]:
    assert rate == 8000
    return ((samples - samples.mean()) / np.sqrt(samples.var() + 1e-7))[:, None]


def resized(image: NDArray[Any], rate: int | None) -> NDArray[Any]:
    pillow = pytest.importorskip("PIL.Image")
    small = pillow.fromarray(image).resize((24, 32), pillow.Resampling.BICUBIC)
    pixels: NDArray[Any] = np.asarray(small, np.float64).transpose(2, 0, 1) / 255
    return (pixels - 0.5) / 0.5


@pytest.mark.parametrize(("config", "original"), [(AUDIO, normalized), (IMAGE, resized)])
def test_equal_features_are_counted(config: ProcessorConfig, original: Any) -> None:
    found = compare_processor(config, original, "mine", "processor")
    assert (found.original, found.inputs) == ("mine", INPUTS)
    assert found.largest_error < 1e-5


def test_other_features_are_refused() -> None:
    for wrong in (
        lambda samples, rate: normalized(samples, rate) * 1.01,
        lambda samples, rate: normalized(samples, rate)[:-1],
        lambda samples, rate: normalized(samples, rate) * np.nan,
    ):
        with pytest.raises(ParityError):
            compare_processor(AUDIO, wrong, "mine", "processor")
    with pytest.raises(BackendError):
        compare_processor(AUDIO, lambda samples, rate: 1 / 0, "mine", "processor")
