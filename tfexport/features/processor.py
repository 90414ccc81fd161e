"""Turn audio and images, as files or arrays, into features.

    processor = FeatureProcessor.from_config(config)
    processor.extract("speech.wav")  # float32 [frames, feature_dim]
    processor.extract(samples, rate=44_100)

Bytes are the content of a file. A path is opened, so never pass a text that comes from an untrusted client.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tfexport._io.names import checked_path
from tfexport._io.strict_json import plain_problem
from tfexport.errors import InputError, raise_all, shortened
from tfexport.features.audio import Array, array_audio, read_audio, resample
from tfexport.features.config import AudioConfig, FeatureConfig, ImageConfig
from tfexport.features.image import array_image, image_features, read_image
from tfexport.features.spectrum import audio_features

Source = str | PathLike[str] | bytes | NDArray[Any]


class FeatureProcessor(ABC):
    """Compute the features of one kind of input; safe to use in several threads."""

    config: FeatureConfig

    @staticmethod
    def from_config(config: FeatureConfig) -> FeatureProcessor:
        """Create the processor of a configuration."""
        return AudioProcessor(config) if isinstance(config, AudioConfig) else ImageProcessor(config)

    @abstractmethod
    def extract(self, source: Source, *, rate: int | None = None) -> Array:
        """Return the features of one input.

        Args:
            source: the path or the bytes of a file, or an array. Audio: samples, float [samples] or
                [samples, channels] in -1 to 1, with `rate`. Images: pixels, uint8 or float in 0 to 1, [height, width]
                or [height, width, channels]. Features in the shape of `config.shape`, float, are returned unchanged.
            rate: samples per second of an array of samples; without it, an array has features.

        Returns:
            float32 in the shape of `config.shape`: [frames, feature_dim] or [channels, height, width].

        Raises:
            InputError: the input is damaged, too long or large, or not of this kind.
            BackendError: an optional package for this format is not installed.
        """


class AudioProcessor(FeatureProcessor):
    """Compute the features of audio; see `FeatureProcessor`."""

    def __init__(self, config: AudioConfig) -> None:
        self.config: AudioConfig = config

    def extract(self, source: Source, *, rate: int | None = None) -> Array:
        """Return float32 [frames, feature_dim]; see `FeatureProcessor.extract`."""
        found, name = _content(source, "audio")
        if isinstance(found, np.ndarray):
            if rate is None:
                remedy = "give rate with an array of samples"
                return _checked_features(found, self.config.shape, self.config.max_frames, name, remedy)
            samples = array_audio(found, rate, name, self.config.max_seconds)
        elif rate is not None:
            raise InputError(f"rate is {shortened(rate)}, but a file states its rate; give it only with an array")
        else:
            samples, rate = read_audio(found, name, self.config.max_seconds)
        return audio_features(resample(samples, rate, self.config.rate), self.config, name)


class ImageProcessor(FeatureProcessor):
    """Compute the features of images; see `FeatureProcessor`."""

    def __init__(self, config: ImageConfig) -> None:
        self.config: ImageConfig = config

    def extract(self, source: Source, *, rate: int | None = None) -> Array:
        """Return float32 [channels, height, width]; see `FeatureProcessor.extract`."""
        if rate is not None:
            raise InputError(f"rate is {shortened(rate)}, but an image has none; give it only with samples")
        found, name = _content(source, "image")
        if not isinstance(found, np.ndarray):
            image = read_image(found, name, self.config.channels)
        elif found.shape == self.config.shape and np.issubdtype(found.dtype, np.floating):
            return _checked_features(found, self.config.shape, 0, name, "")
        else:
            image = array_image(found, name, self.config)
        return image_features(image, self.config)


def _content(source: object, kind: str) -> tuple[Path | bytes | NDArray[Any], str]:
    """Return a path, bytes or array, and what errors about it begin with."""
    if isinstance(source, bytes | np.ndarray):
        return source, f"the {kind}"
    if not isinstance(source, str | PathLike):
        raise InputError(f"the {kind} is {shortened(source)}, expected a path, bytes or a NumPy array")
    path = checked_path(source, "path")
    if problem := plain_problem(path):
        raise InputError(problem, subject=str(path), remedy="check the path")
    return path, str(path)


def _checked_features(
    features: NDArray[Any], shape: tuple[int | None, ...], max_frames: int, name: str, remedy: str
) -> Array:
    spelled = ", ".join("frames" if size is None else str(size) for size in shape)
    problems = []
    is_shaped = len(features.shape) == len(shape) and all(
        1 <= size <= max_frames if want is None else size == want
        for size, want in zip(features.shape, shape, strict=True)
    )
    if not is_shaped or not np.issubdtype(features.dtype, np.floating):
        most = f" with 1 to {max_frames} frames" if None in shape else ""
        problems.append(f"is {features.dtype} {list(features.shape)}, expected float features [{spelled}]{most}")
    elif not np.isfinite(features).all():
        problems.append("has features that are infinite or not a number")
    raise_all(InputError, name, problems, remedy=remedy)
    return np.ascontiguousarray(features, np.float32)
