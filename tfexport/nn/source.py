"""Tensors of a source: what the encoder reads, and the masks before and after it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tfexport.nn.cache import Cross, Source
from tfexport.sources import FeatureSource, ImageSource, SourceKind

# Names of the classes that compute attention to the source in PyTorch.
PaddedSource = Source
CrossCache = Cross


def encoder_inputs(kind: SourceKind, inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return `x` and its mask for `encode`, from the inputs of the encoder graph.

    `x` is ids int64 [batch, source_len] or float32, features [batch, frames, dim] or pixels [batch, channels, height,
    width]. The mask is bool [batch, source_len or frames], and all True [batch, positions] for images.
    """
    if isinstance(kind, ImageSource):
        (pixels,) = inputs
        return pixels, torch.ones(pixels.shape[0], kind.positions, dtype=torch.bool, device=pixels.device)
    x, mask = inputs
    return x, mask


def position_mask(kind: SourceKind, mask: Tensor) -> Tensor:
    """Return the mask of the encoder's positions, bool [batch, source_len].

    `mask` is a result of `encoder_inputs`.
    """
    if not isinstance(kind, FeatureSource):
        return mask
    return length_mask(kind.positions(mask.sum(1)), kind.positions(mask.shape[1]))


def length_mask(lengths: Tensor, longest: int) -> Tensor:
    """Return the mask of rows of `lengths`, int64 [batch], padded on the right."""
    return torch.arange(longest, device=lengths.device) < lengths[:, None]
