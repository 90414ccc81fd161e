"""Read the convolutions before an encoder of features."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from tfexport.errors import CheckpointError, ConfigError
from tfexport.importing.detect import _keys
from tfexport.importing.detect._keys import Part
from tfexport.importing.detect._layers import Choice, Reading
from tfexport.nn.config import ConvolutionActivation, ConvolutionConfig, FeaturesConfig

# Shapes show neither of them; the most common first.
_ACTIVATIONS: tuple[ConvolutionActivation, ...] = ("gelu", "relu", "silu", "none")
_STRIDES = (2, 1)
_COST = 0.1  # of each step from the usual reading, less than that of an unusual reading of other modules
_MAX_CONVOLUTIONS = 4


def read_front(parts: Sequence[Part], d_model: int, dim: int, skip: int) -> tuple[Choice, list[Part]]:
    """Return the readings of the front end, the most likely first, and its modules."""
    convolutions = [part for part in parts if len(part.shape) in (3, 4) and not _keys.is_bare(part.weight or ".")]
    if len(convolutions) > _MAX_CONVOLUTIONS:
        raise CheckpointError(f"{len(convolutions)} convolutions are outside of the layers, expected up to 4")
    maps = [part for part in parts if _is_map(part, d_model, skip) and part not in convolutions]
    readings = []
    for linear in (*maps, None):
        used = [*convolutions, *([] if linear is None else [linear])]
        lines = [
            line for number, part in enumerate(convolutions) for line in part.lines(f"enc.front.layers.{number}.conv")
        ]
        lines += linear.lines("enc.front.proj") if linear else []
        for place, config in enumerate(_configs(convolutions, linear, d_model, dim)):
            # The scale of the decoder's embeddings seldom applies to features.
            for cost, arch in ((0.0, {"enc.embedding_scale": 1.0}), (1.5 * _COST, {})):
                readings.append((used, Reading(tuple(lines), _COST * place + cost, arch=arch, features=config)))
        if readings:
            break
    if not readings:
        raise CheckpointError(
            f"no convolutions or linear map turn {dim} features into the width {d_model}; write a layout, see "
            "docs/reference/layouts.md, or export it as your own module, see docs/guides/your-own-module.md"
        )
    found = sorted((reading for _, reading in readings), key=lambda reading: reading.cost)
    return tuple(found), readings[0][0]


def _is_map(part: Part, d_model: int, skip: int) -> bool:
    is_decoder = _keys.side(".".join(part.keys[0].split(".")[skip:])) == "dec"
    return len(part.shape) == 2 and part.shape[0] == d_model and part.weight is not None and not is_decoder


def _configs(convolutions: Sequence[Part], linear: Part | None, d_model: int, dim: int) -> Iterator[FeaturesConfig]:
    """Yield the front ends that fit the shapes, with all strides and activations."""
    channels = _channels(convolutions, linear, d_model, dim)
    if channels is None:
        return
    is_2d = any(len(part.shape) == 4 for part in convolutions)
    kernels = [part.shape[-1] for part in convolutions]
    ways = itertools.product((True, False), itertools.product(_STRIDES, repeat=len(kernels)), _ACTIVATIONS)
    for is_padded, strides, activation in sorted(ways, key=_order) if kernels else [(True, (), _ACTIVATIONS[0])]:
        try:
            config = FeaturesConfig(
                dim=dim,
                convolutions=tuple(
                    ConvolutionConfig(
                        kernel=kernel,
                        stride=stride,
                        padding=kernel // 2 if is_padded else 0,
                        channels=count,
                        activation="glu" if part.shape[0] == 2 * count else activation,
                        bias=part.bias is not None,
                    )
                    for part, kernel, stride, count in zip(convolutions, kernels, strides, channels, strict=True)
                ),
                conv2d=is_2d,
                projection=linear is not None,
            )
        except ConfigError:  # nothing is left of the features
            continue
        if config.width == (linear.shape[1] if linear else d_model):
            yield config


def _order(way: tuple[bool, tuple[int, ...], ConvolutionActivation]) -> float:
    is_padded, strides, activation = way
    return sum(stride == 1 for stride in strides) + _ACTIVATIONS.index(activation) + 2 * (not is_padded)


def _channels(convolutions: Sequence[Part], linear: Part | None, d_model: int, dim: int) -> list[int] | None:
    """Return the channels after each convolution; None if the shapes do not chain."""
    is_2d = any(len(part.shape) == 4 for part in convolutions)
    wanted: list[int | None] = [part.shape[1] for part in convolutions]
    last = None if is_2d and linear else linear.shape[1] if linear else d_model
    if not wanted:
        return [] if last == dim else None
    if wanted[0] != (1 if is_2d else dim) or len({len(part.shape) for part in convolutions}) > 1:
        return None
    after, found = [*wanted[1:], last], list[int]()
    for part, count in zip(convolutions, after, strict=True):
        if count not in (None, part.shape[0], part.shape[0] / 2) or len(set(part.shape[2:])) > 1:
            return None
        found.append(part.shape[0] if count is None else count)
    return found if math.prod(found) else None
