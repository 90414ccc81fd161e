"""Audio that is made here: tones, noise, chirps, pulses and speech-like sounds."""

from __future__ import annotations

import io
import wave
from collections.abc import Iterator

import numpy as np

RATE = 16_000
LENGTHS = (401, 560, 1000, 3999, 8000, 12_345, 16_000, 16_001, 24_000, 32_000, 40_000, 47_999)


def signals() -> Iterator[tuple[str, np.ndarray]]:
    """Yield 72 names and float32 signals at 16 kHz."""
    rng = np.random.default_rng(0)
    for size in LENGTHS:
        t = np.arange(size) / RATE
        voice = sum(np.sin(2 * np.pi * k * (120 * t + 3 * np.sin(5 * t))) / k for k in range(1, 30))
        found = {
            "tone": 0.5 * np.sin(2 * np.pi * 440 * t),
            "noise": rng.normal(size=size) * 0.1,
            "quiet noise": rng.normal(size=size) * 1e-4 + 0.01,
            "chirp": 0.9 * np.sin(2 * np.pi * (50 * t + 3900 * t * t / t[-1])),
            "pulses": np.where(np.arange(size) % 1777 == 5, 1.0, 0.0) + rng.normal(size=size) * 1e-3,
            "voice": 0.2 * voice * (0.6 + 0.4 * np.sin(2 * np.pi * 3 * t)),
        }
        yield from ((f"{name} of {size}", signal.astype(np.float32)) for name, signal in found.items())


def wav(samples: np.ndarray, rate: int = RATE, width: int = 2) -> bytes:
    """Write float [samples] or [samples, channels] as whole numbers of `width` bytes."""
    columns = samples[:, None] if samples.ndim == 1 else samples
    whole = np.clip(np.rint(columns * 2.0 ** (8 * width - 1)), -(2 ** (8 * width - 1)), 2 ** (8 * width - 1) - 1)
    whole = (whole.astype(np.int64) + (128 if width == 1 else 0)).astype("<i8")
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(columns.shape[1])
        writer.setsampwidth(width)
        writer.setframerate(rate)
        writer.writeframes(whole.view(np.uint8).reshape(-1, 8)[:, :width].tobytes())
    return file.getvalue()
