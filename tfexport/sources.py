"""What an encoder reads: token ids, features or images.

A kind of source names the inputs of the encoder graph and computes how many positions the encoder returns. Everything
above the encoder treats a source as an opaque value; `tfexport.runtime.sources` checks and pads them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from tfexport.config import Config, Count, Help, Size
from tfexport.precision import DType

# Inputs of encoder graphs.
SOURCE_IDS = "source_ids"
SOURCE_MASK = "source_mask"
FEATURES = "features"
FEATURE_MASK = "feature_mask"
PIXELS = "pixels"

BATCH, SOURCE_LEN, FRAMES = "batch", "source_len", "frames"
Inputs = Mapping[str, tuple[DType, tuple[str | int, ...]]]


@dataclass(frozen=True)
class TokenSource:
    """Token ids below `vocab`."""

    vocab: int
    pad_id: int
    special: tuple[int, ...] = ()  # ids that no random source contains
    unit = "tokens"
    source_len = SOURCE_LEN  # dimension of the encoder's outputs

    @property
    def inputs(self) -> Inputs:
        """`source_ids` and `source_mask`, True for tokens."""
        shape = (BATCH, SOURCE_LEN)
        return {SOURCE_IDS: ("int64", shape), SOURCE_MASK: ("bool", shape)}

    def sizes(self, source_len: int) -> dict[str, int]:
        """Return the largest sizes of axes that give `source_len` positions."""
        return {SOURCE_LEN: source_len}

    def fits(self, source_len: int) -> int:
        """Return the number of positions of a source near `source_len`."""
        return source_len


class Convolution(Config, subject="convolution"):
    """Kernel, stride and padding of a convolution along the frames."""

    kernel: Size
    stride: Size = 1
    padding: Count = 0

    def positions(self, frames: Any) -> Any:
        """Return the positions of a number, array or tensor of frames."""
        return (frames + (2 * self.padding - self.kernel)) // self.stride + 1


class FeatureSource(Config, subject="features"):
    """Features, float32 [frames, dim]: filter banks, sensors, or a waveform.

    `convolutions` shorten a source before or in the encoder, in order. Models that always read the same number of
    `frames` attend to all of them.
    """

    dim: Annotated[Size, Help("features of a frame")]
    convolutions: Annotated[tuple[Convolution, ...], Help("convolutions along the frames, in order")] = ()
    frames: Annotated[Size | None, Help("number of frames of every source; None: it varies")] = None
    unit = "positions"
    source_len = SOURCE_LEN

    @property
    def inputs(self) -> Inputs:
        """`features` and `feature_mask`, True for frames."""
        return {FEATURES: ("float32", (BATCH, FRAMES, self.dim)), FEATURE_MASK: ("bool", (BATCH, FRAMES))}

    def positions(self, frames: Any) -> Any:
        """Return the positions of a number, array or tensor of frames."""
        for each in self.convolutions:
            frames = each.positions(frames)
        return frames

    def most_frames(self, positions: int) -> int:
        """Return the largest number of frames that become `positions`."""
        for each in reversed(self.convolutions):
            positions = positions * each.stride + each.kernel - 2 * each.padding - 1
        return positions

    def least_frames(self, positions: int) -> int:
        """Return the smallest number of frames that become `positions`."""
        return self.frames or self.most_frames(positions - 1) + 1

    def sizes(self, source_len: int) -> dict[str, int]:
        """Return the largest number of frames with `source_len` positions."""
        return {FRAMES: self.frames or self.most_frames(source_len)}

    def fits(self, source_len: int) -> int:
        """Return the positions of all frames, if their number is fixed."""
        return source_len if self.frames is None else int(self.positions(self.frames))


class ImageSource(Config, subject="image"):
    """Images of one size, float32 [channels, height, width], which become `positions`."""

    channels: Size
    height: Size
    width: Size
    positions: Annotated[Size, Help("number of positions that the encoder returns, such as patches")]
    unit = "positions"

    @property
    def source_len(self) -> int:
        """Dimension of the encoder's outputs."""
        return self.positions

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of one image."""
        return self.channels, self.height, self.width

    @property
    def inputs(self) -> Inputs:
        """`pixels`."""
        return {PIXELS: ("float32", (BATCH, *self.shape))}

    def sizes(self, source_len: int) -> dict[str, int]:
        """Return nothing, because the size is fixed."""
        return {}

    def fits(self, source_len: int) -> int:
        """Return `positions`."""
        return self.positions


SourceKind = TokenSource | FeatureSource | ImageSource
