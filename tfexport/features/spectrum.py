"""Compute features of mono samples."""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from tfexport.errors import InputError
from tfexport.features.audio import Array
from tfexport.features.config import AudioConfig

_Floats = NDArray[np.float64]

_BLOCK = 512  # frames that are transformed together; more leave the processor's cache
_LOG_MEL_TOP_HZ, _FBANK_BOTTOM_HZ = 8000.0, 20.0
_FBANK_FLOOR = 2.0**-23  # the spacing of float32 numbers at 1
_PREEMPHASIS = 0.97


def audio_features(samples: Array, config: AudioConfig, name: str) -> Array:
    """Return the features of mono samples that have the rate of the configuration.

    Args:
        samples: float32 [samples].
        config: which features.
        name: what errors begin with.

    Returns:
        float32 [frames, feature_dim].

    Raises:
        InputError: the audio is too short or silent for its features to exist.
    """
    if config.kind == "log_mel":
        return _log_mel(samples, config)
    features = samples if config.kind == "waveform" else _fbank(samples, config, name)
    if config.kind == "fbank" and config.divide_by_std and bool((features == features[0]).all(axis=0).any()):
        problem = "has a frequency band with the same energy in every frame, which cannot be normalized"
        raise InputError(problem, subject=name, remedy="give audio that is longer and not silent")
    # In float32 as transformers does, because a small deviation enlarges what float32 rounds in the mean.
    if config.subtract_mean:
        features = features - features.mean(axis=0)
    if config.divide_by_std:
        features = features / np.sqrt(features.var(axis=0) + np.float32(1e-7 if config.kind == "waveform" else 0))
    return features.reshape(len(features), config.feature_dim)


def _log_mel(samples: Array, config: AudioConfig) -> Array:
    assert config.num_frames is not None
    size, half = config.num_frames * config.hop, config.window // 2
    samples = np.pad(samples[:size], (0, max(0, size - len(samples))))
    # The last window, which is centered on the end, is not used.
    framed = _framed(np.pad(samples, half, mode="reflect"), config)[: config.num_frames]
    filters, window = _slaney_filters(config), np.hanning(config.window + 1)[:-1]
    parts = [_power(frames * window) @ filters for frames in _blocks(framed)]
    logs = np.log10(np.maximum(np.concatenate(parts), 1e-10))
    features: _Floats = (np.maximum(logs, logs.max() - 8) + 4) / 4
    return features.astype(np.float32)


def _fbank(samples: Array, config: AudioConfig, name: str) -> Array:
    if len(samples) < config.window:
        problem = f"has {len(samples)} samples at {config.rate} Hz, expected at least {config.window}"
        raise InputError(problem, subject=name, remedy="give longer audio")
    filters, window = _kaldi_filters(config), np.hanning(config.window) ** 0.85
    parts = []
    for frames in _blocks(_framed(samples * np.float32(2**15), config)):  # Kaldi computes with 16-bit numbers
        centered = frames - frames.mean(axis=1, keepdims=True)
        before = np.concatenate([centered[:, :1], centered[:, :-1]], axis=1)
        parts.append(_power((centered - _PREEMPHASIS * before) * window, _fft_size(config)) @ filters)
    return np.log(np.maximum(np.concatenate(parts), _FBANK_FLOOR)).astype(np.float32)


def _framed(samples: Array, config: AudioConfig) -> Array:
    return np.lib.stride_tricks.sliding_window_view(samples, config.window)[:: config.hop]


def _blocks(framed: Array) -> list[_Floats]:
    return [framed[i : i + _BLOCK].astype(np.float64) for i in range(0, len(framed), _BLOCK)]


def _power(frames: _Floats, size: int | None = None) -> _Floats:
    spectrum = np.fft.rfft(frames, size).astype(np.complex64)
    return np.abs(spectrum, dtype=np.float64) ** 2


def _fft_size(config: AudioConfig) -> int:
    return 1 << (config.window - 1).bit_length()


@functools.lru_cache(maxsize=8)
def _slaney_filters(config: AudioConfig) -> _Floats:
    """Return triangles of equal area in Slaney's mels, [frequencies, bands]."""
    step = np.log(6.4) / 27  # 15 mels are 1000 Hz: linear below, logarithmic above
    top = 15 + np.log(_LOG_MEL_TOP_HZ / 1000) / step
    mels = np.linspace(0, top, config.feature_dim + 2)
    corners = np.where(mels < 15, mels * 200 / 3, 1000 * np.exp(step * (mels - 15)))
    frequencies = np.linspace(0, config.rate // 2, config.window // 2 + 1)
    return _triangles(frequencies, corners) * (2 / (corners[2:] - corners[:-2]))


@functools.lru_cache(maxsize=8)
def _kaldi_filters(config: AudioConfig) -> _Floats:
    """Return triangles of height 1 in Kaldi's mels, [frequencies, bands]."""
    bottom, top = _kaldi_mels(np.array([_FBANK_BOTTOM_HZ, config.rate // 2], np.float64))
    size = _fft_size(config)
    mels = _kaldi_mels(np.arange(size // 2 + 1) * np.float64(config.rate / size))
    return _triangles(mels, np.linspace(bottom, top, config.feature_dim + 2))


def _kaldi_mels(hertz: _Floats) -> _Floats:
    return 1127 * np.log1p(hertz / 700)


def _triangles(points: _Floats, corners: _Floats) -> _Floats:
    rising = (points[:, None] - corners[:-2]) / np.diff(corners)[:-1]
    falling = (corners[2:] - points[:, None]) / np.diff(corners)[1:]
    return np.maximum(0, np.minimum(rising, falling))
