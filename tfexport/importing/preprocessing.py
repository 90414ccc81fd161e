"""Compare the processor of a model with the code that it was trained with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tfexport.bundle.processor import Comparison, ProcessorConfig
from tfexport.errors import BackendError, ParityError, raised_by
from tfexport.features.config import AudioConfig

INPUTS = 32
_TOLERANCE = 1e-4
_REMEDY = "correct its settings, or leave it out and compute the features yourself"
# Called with samples, float32 [samples], and their rate, or with an image, uint8 [height, width, 3], and None.
Preprocess = Callable[[NDArray[Any], int | None], Any]


def compare_processor(config: ProcessorConfig, original: Preprocess, author: str, name: str) -> Comparison:
    """Compare features of signals like voices, or of images.

    Raises:
        BackendError: `original` fails.
        ParityError: features differ in shape, or by more than 1e-4.
    """
    audio, errors = config.audio, list[float]()
    rate = audio.rate if audio else None
    for value in _signals(audio) if audio else _pictures():
        try:
            expected = np.asarray(original(value.copy(), rate))
        except Exception as error:
            problem = f"{raised_by(error)}, called with {value.dtype} {list(value.shape)} and {rate}"
            raise BackendError(f"{author} cannot run ({problem})") from error
        found = config.processor.extract(value, rate=rate)
        if expected.shape != found.shape:
            problem = f"gives features {list(found.shape)}, those of {author} are {list(expected.shape)}"
            raise ParityError(problem, subject=name, remedy=_REMEDY)
        errors.append(float(np.abs(found - expected).max()))
    if not max(errors) <= _TOLERANCE:
        problem = f"differs from {author} by {max(errors):.1e}, expected at most {_TOLERANCE:.0e}"
        raise ParityError(problem, subject=name, remedy=_REMEDY)
    return Comparison(original=author, inputs=len(errors), largest_error=max(errors))


def _signals(config: AudioConfig) -> Iterator[NDArray[np.float32]]:
    """Yield signals like voices in noise, float32 [samples], of 0.05 to 3 s."""
    rng = np.random.default_rng(0)
    for _ in range(INPUTS):
        size = int(config.rate * min(rng.uniform(0.05, 3.0), config.max_seconds))
        time = np.arange(size) / config.rate
        phase = 2 * np.pi * rng.uniform(80, 400) * time
        voice = sum(np.sin(k * phase) / k for k in range(1, 12)) * np.sin(20 * time) ** 2
        # Noise in every band, because transformers may compute in float32, which rounds silence.
        yield (0.1 * voice + rng.choice([0.003, 0.03, 0.1]) * rng.normal(size=size)).astype(np.float32)


def _pictures() -> Iterator[NDArray[np.uint8]]:
    """Yield smooth and noisy images, uint8 [height, width, 3]."""
    rng = np.random.default_rng(0)
    for number in range(INPUTS):
        height, width = rng.integers(16, 400, 2)
        image = rng.integers(0, 256, (height, width, 3))
        yield (image.cumsum(1) // np.arange(1, width + 1)[:, None] if number % 2 else image).astype(np.uint8)
