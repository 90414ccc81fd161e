"""The processor of a model, as processor.json stores it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Self

from tfexport._io.names import PROCESSOR
from tfexport._io.strict_json import read_json
from tfexport.config import Config
from tfexport.contract import ModelSpec
from tfexport.errors import ConfigError, raise_all
from tfexport.features.config import AudioConfig, ImageConfig
from tfexport.features.processor import FeatureProcessor


class Comparison(Config, subject="compared"):
    """How the processor was compared with the one that the model was trained with."""

    original: str  # name of that code
    inputs: int  # number of signals or images
    largest_error: float  # of a feature


class ProcessorConfig(Config, subject=PROCESSOR):
    """How audio or images become what the encoder reads: one of the two."""

    audio: AudioConfig | None = None
    image: ImageConfig | None = None
    compared: Comparison | None = None  # None if it was never compared

    def _problems(self) -> Iterator[str]:
        if (self.audio is None) == (self.image is None):
            yield "audio and image: expected one of them"

    @classmethod
    def read(cls, path: Path, spec: ModelSpec) -> Self:
        """Read processor.json for a model."""
        config = cls.from_dict(read_json(path, PROCESSOR), subject=PROCESSOR)
        raise_all(ConfigError, PROCESSOR, config.problems_for(spec))
        return config

    @property
    def processor(self) -> FeatureProcessor:
        """The object that computes the features."""
        config = self.audio or self.image
        assert config is not None
        return FeatureProcessor.from_config(config)

    def problems_for(self, spec: ModelSpec) -> list[str]:
        """List how the features differ from those that a model reads."""
        expected: tuple[int | None, ...] | None = None
        if spec.features is not None and self.audio is not None:
            expected = (spec.features.frames, spec.features.dim)
        elif spec.image is not None and self.image is not None:
            expected = spec.image.shape
        got = self.processor.config.shape
        return [] if got == expected else [f"gives features {got}, the model reads {expected or 'something else'}"]
