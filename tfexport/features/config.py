"""How audio or an image becomes features."""

import math
from collections.abc import Iterator
from typing import Annotated, Literal

from tfexport.config import Config, Ge, Gt, Help, Le

MAX_RATE = 384_000
# Beyond these values a configuration is a mistake or an attack, and would exhaust the memory.
_MAX_FRAMES, _MAX_FEATURES, _MAX_WINDOW, _MAX_SECONDS, _MAX_EDGE = 1_000_000, 512, 4096, 3600, 4096


class AudioConfig(Config, subject="audio"):
    """How audio becomes features [frames, feature_dim].

    `log_mel` are those of Whisper, `fbank` those of Kaldi and Speech2Text, and `waveform` the samples themselves.
    """

    kind: Annotated[Literal["log_mel", "fbank", "waveform"], Help("Features that are computed from the samples.")]
    feature_dim: Annotated[int, Ge(1), Le(_MAX_FEATURES), Help("Mel bands, or 1 for a waveform.")]
    rate: Annotated[int, Ge(1000), Le(MAX_RATE), Help("Samples per second; other audio is resampled.")] = 16_000
    window: Annotated[int, Ge(2), Le(_MAX_WINDOW), Help("Samples of a window; unused for a waveform.")] = 400
    hop: Annotated[int, Ge(1), Le(_MAX_WINDOW), Help("Samples between two windows; unused for a waveform.")] = 160
    num_frames: Annotated[
        int | None,
        Ge(1),
        Le(_MAX_FRAMES),
        Help("Frames of every input: silence is appended, or the end is cut. Null keeps the length."),
    ] = None
    subtract_mean: Annotated[bool, Help("Subtract the mean of each feature over the frames.")] = False
    divide_by_std: Annotated[bool, Help("Divide by the standard deviation over the frames.")] = False
    max_seconds: Annotated[float, Gt(0), Le(_MAX_SECONDS), Help("Longest audio; longer audio is an error.")] = 60.0

    def _problems(self) -> Iterator[str]:
        is_log_mel = self.kind == "log_mel"
        if self.kind == "waveform" and self.feature_dim != 1:
            yield f"feature_dim is {self.feature_dim}, expected 1 for a waveform"
        if is_log_mel != (self.num_frames is not None):
            yield f"num_frames is {self.num_frames}, expected {'a number' if is_log_mel else 'null'} for {self.kind}"
        if is_log_mel and (self.subtract_mean or self.divide_by_std):
            yield "subtract_mean and divide_by_std are not supported for log_mel"
        if is_log_mel and self.num_frames and self.num_frames * self.hop <= self.window // 2:
            yield f"num_frames is {self.num_frames}, expected more than half a window"
        if is_log_mel and self.rate < 16_000:
            yield f"rate is {self.rate}, expected 16000 or more for log_mel, which has bands up to 8000 Hz"
        if self.kind == "waveform" and self.subtract_mean != self.divide_by_std:
            yield "subtract_mean and divide_by_std differ, expected the same for a waveform"

    @property
    def shape(self) -> tuple[int | None, int]:
        """Frames, or None if they depend on the audio, and feature_dim."""
        return self.num_frames, self.feature_dim

    @property
    def max_frames(self) -> int:
        """The number of frames of the longest audio."""
        samples = math.ceil(self.max_seconds * self.rate)
        return self.num_frames or (samples if self.kind == "waveform" else 1 + (samples - self.window) // self.hop)


class ImageConfig(Config, subject="image"):
    """How an image becomes features [channels, height, width].

    The features are `(pixel * scale - mean) / std`, for pixels of 0 to 255.
    """

    height: Annotated[int, Ge(8), Le(_MAX_EDGE), Help("Height that every image is resized to.")]
    width: Annotated[int, Ge(8), Le(_MAX_EDGE), Help("Width that every image is resized to.")]
    channels: Annotated[Literal[1, 3], Help("3 for RGB, 1 for gray.")] = 3
    resample: Annotated[Literal["bilinear", "bicubic", "lanczos"], Help("Filter for resizing.")] = "bilinear"
    scale: Annotated[float, Gt(0), Le(255), Help("Factor of the pixels.")] = 1 / 255
    mean: Annotated[tuple[float, ...], Help("Mean of each channel, after scaling.")] = (0.5, 0.5, 0.5)
    std: Annotated[tuple[float, ...], Gt(0), Help("Standard deviation of each channel.")] = (0.5, 0.5, 0.5)

    def _problems(self) -> Iterator[str]:
        for name in ("mean", "std"):
            if (count := len(getattr(self, name))) != self.channels:
                yield f"{name} has {count} numbers, expected {self.channels}, one for each channel"

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width."""
        return self.channels, self.height, self.width


FeatureConfig = AudioConfig | ImageConfig
