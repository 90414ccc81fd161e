"""Read audio as mono samples and resample it."""

from __future__ import annotations

import functools
import io
import math
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

from tfexport._io.extras import install_command
from tfexport.errors import BackendError, InputError, first_line, raise_all, shortened
from tfexport.features.config import MAX_RATE

Array = NDArray[np.float32]

_MIN_RATE, _MAX_CHANNELS, _BLOCK = 1000, 32, 1 << 16
# The first bytes of files that soundfile reads: WAV, 64-bit WAV, FLAC, Ogg, AIFF and MP3, with tags or without.
_MAGIC = (b"RIFF", b"RF64", b"fLaC", b"OggS", b"FORM", b"ID3", b"\xff\xfb", b"\xff\xf3", b"\xff\xf2", b"\xff\xfa")
_CONVERT = "convert it, for example with ffmpeg -i FILE -c:a pcm_s16le FILE.wav"
_MAX_PEAK = 100.0  # float samples may exceed 1, but not by 40 dB
_PASSED = 0.91  # of the lower Nyquist frequency; between it and the frequency itself a cosine fades to zero


def read_audio(source: Path | bytes, name: str, max_seconds: float) -> tuple[Array, int]:
    """Return the mono samples of a file or its content, and their rate.

    WAV files of whole numbers are read by the standard library, all others by soundfile. Channels are averaged.
    Truncated files are refused, except MP3 and Ogg files, which do not state their length.

    Args:
        source: a path, or the bytes of a file.
        name: what errors begin with.
        max_seconds: longer audio is refused before it is decoded.

    Returns:
        float32 [samples] in -1 to 1, and samples per second.

    Raises:
        InputError: the file is damaged, too long, empty or not audio.
        BackendError: the format needs soundfile, which is not installed.
    """
    try:
        with source.open("rb") if isinstance(source, Path) else io.BytesIO(source) as file:
            samples, rate, announced = _read(file, name, max_seconds)
    except OSError as error:
        raise InputError(f"cannot be read ({first_line(error)})", subject=name, remedy="check the file") from error
    if len(samples) < announced:
        raise _truncated(f"it has {len(samples)} of {announced} samples", name)
    _check_samples(samples, name)
    return samples, rate


def array_audio(samples: NDArray[Any], rate: int, name: str, max_seconds: float) -> Array:
    """Check float [samples] or [samples, channels] and average the channels."""
    if samples.ndim not in (1, 2) or not np.issubdtype(samples.dtype, np.floating):
        expected = "float [samples] or [samples, channels], from -1 to 1"
        raise InputError(f"is {samples.dtype} {list(samples.shape)}, expected {expected}", subject=name)
    if type(rate) is not int:
        raise InputError(f"rate is {shortened(rate)}, expected a whole number", subject=name)
    columns = samples[:, None] if samples.ndim == 1 else samples
    _check_header(name, max_seconds, rate, columns.shape[1], len(columns))
    found = _mixed(columns)
    _check_samples(found, name)
    return found


def _read(file: BinaryIO, name: str, max_seconds: float) -> tuple[Array, int, int]:
    start = file.read(12)
    if not start:
        raise InputError("is empty", subject=name, remedy="check the file")
    if not start.startswith(_MAGIC) or (start[:4] == b"RIFF" and start[8:] != b"WAVE"):
        problem = "is not audio in a supported format (WAV, FLAC, Ogg, MP3, AIFF)"
        raise InputError(problem, subject=name, remedy=_CONVERT)
    file.seek(0)
    check = functools.partial(_check_header, name, max_seconds)
    if start[:4] == b"RIFF":
        try:
            return _read_wave(file, name, check)
        except _NotPcmError:
            file.seek(0)
    return _read_soundfile(file, name, check)


class _NotPcmError(Exception):
    """A WAV file has floats, or an extended header, which Python 3.11 cannot read."""


_Check = Callable[[int, int, int], None]


def _check_header(name: str, max_seconds: float, rate: int, channels: int, frames: int) -> None:
    problems = []
    if not _MIN_RATE <= rate <= MAX_RATE:
        problems.append(f"has {rate} samples per second, expected {_MIN_RATE} to {MAX_RATE}")
    elif frames > max_seconds * rate:
        problems.append(f"has {frames / rate:.1f} s, expected at most {max_seconds:g} s")
    if not 1 <= channels <= _MAX_CHANNELS:
        problems.append(f"has {channels} channels, expected 1 to {_MAX_CHANNELS}")
    raise_all(InputError, name, problems, remedy="split or convert it")


@np.errstate(invalid="ignore")
def _check_samples(samples: Array, name: str) -> None:
    if not len(samples):
        raise InputError("has no samples", subject=name, remedy="give audio that is not empty")
    if not (peak := float(np.abs(samples).max())) <= _MAX_PEAK:  # also if there are NaNs
        problem = f"has samples of up to {peak:g}, expected -1 to 1"
        raise InputError(problem, subject=name, remedy="divide 16-bit samples by 32768, and remove NaNs")


def _read_wave(file: BinaryIO, name: str, check: _Check) -> tuple[Array, int, int]:
    size = file.seek(0, io.SEEK_END)
    file.seek(0)
    try:
        with wave.open(file) as reader:
            width, channels, rate = reader.getsampwidth(), reader.getnchannels(), reader.getframerate()
            frames = reader.getnframes()  # up to 2**32 if the file was written to a pipe
            available = min(frames, size // (width * channels))
            check(rate, channels, available)
            data = reader.readframes(available)
    except (wave.Error, EOFError, RuntimeError) as error:
        if "unknown format" in str(error):
            raise _NotPcmError from error
        reason = first_line(error) if str(error) else "its header is damaged"
        raise InputError(f"is not a valid WAV file ({reason})", subject=name, remedy=_CONVERT) from error
    if width not in (1, 2, 3, 4):
        raise InputError(f"has samples of {width} bytes, expected 1 to 4", subject=name, remedy=_CONVERT)
    data = data[: len(data) // (width * channels) * width * channels]
    if width == 1:
        samples = np.frombuffer(data, np.uint8).astype(np.float32) / 128 - 1
    elif width == 3:
        padded = np.zeros((len(data) // 3, 4), np.uint8)
        padded[:, 1:] = np.frombuffer(data, np.uint8).reshape(-1, 3)
        samples = padded.view("<i4")[:, 0].astype(np.float32) / 2**31
    else:
        samples = np.frombuffer(data, f"<i{width}").astype(np.float32) / 2 ** (8 * width - 1)
    return _mixed(samples.reshape(-1, channels)), rate, frames


def _read_soundfile(file: BinaryIO, name: str, check: _Check) -> tuple[Array, int, int]:
    try:
        import soundfile
    except (ImportError, OSError) as error:  # OSError: without libsndfile
        problem = f"this format needs soundfile, which is not installed; {install_command('soundfile')}, or {_CONVERT}"
        raise BackendError(problem, subject=name) from error
    start, size = file.read(8), file.seek(0, io.SEEK_END)
    file.seek(0)
    order: Literal["little", "big"] = "big" if start[:4] == b"FORM" else "little"
    # libsndfile reads such a file as if it were shorter.
    if start[:4] in (b"RIFF", b"FORM") and (announced := int.from_bytes(start[4:], order)) > size:
        raise _truncated(f"it has {size} of {announced} bytes", name)
    try:
        with soundfile.SoundFile(file) as reader:
            check(reader.samplerate, reader.channels, reader.frames)
            # In blocks, because all channels of compressed silence can be far larger than their file.
            blocks = [_mixed(block) for block in reader.blocks(_BLOCK, dtype="float32", always_2d=True)]
            return np.concatenate([np.empty(0, np.float32), *blocks]), reader.samplerate, reader.frames
    except (RuntimeError, TypeError) as error:  # TypeError: for names of headerless formats, such as x.raw
        raise InputError(f"cannot be decoded ({first_line(error)})", subject=name, remedy=_CONVERT) from error


def _truncated(reason: str, name: str) -> InputError:
    remedy = f"copy it again; if it was written to a pipe, {_CONVERT}"
    return InputError(f"is truncated: {reason}", subject=name, remedy=remedy)


@np.errstate(invalid="ignore", over="ignore")  # `_check_samples` refuses the results
def _mixed(samples: NDArray[np.floating[Any]]) -> Array:
    """Average the channels of samples [samples, channels]."""
    return (samples[:, 0] if samples.shape[1] == 1 else samples.mean(axis=1)).astype(np.float32)


def resample(samples: Array, rate: int, new_rate: int) -> Array:
    """Change the rate of samples by cutting or extending their spectrum.

    Frequencies up to 91% of the lower Nyquist frequency are kept, and none above it.

    Args:
        samples: float32 [samples].
        rate: samples per second.
        new_rate: samples per second of the result.

    Returns:
        float32 [ceil(samples * new_rate / rate)].
    """
    if rate == new_rate:
        return samples
    divisor = math.gcd(rate, new_rate)
    up, down = new_rate // divisor, rate // divisor
    # The transform is periodic: an eighth of a second of silence separates the end from the beginning. Both lengths
    # have the exact ratio of the rates.
    blocks = _smooth(math.ceil((len(samples) + rate // 8) / down))
    spectrum = np.fft.rfft(samples.astype(np.float64), blocks * down)
    bins = blocks * min(up, down) // 2 + 1
    fade = np.clip((np.arange(bins) / (bins - 1) - _PASSED) / (1 - _PASSED), 0, 1)
    spectrum = spectrum[:bins] * (0.5 + 0.5 * np.cos(np.pi * fade))
    changed = np.fft.irfft(spectrum, blocks * up)[: math.ceil(len(samples) * up / down)]
    return (changed * (up / down)).astype(np.float32)


def _smooth(number: int) -> int:
    """Return the next number without prime factors above 5: its transform is fast."""
    while True:
        rest = number
        for factor in (2, 3, 5):
            while rest % factor == 0:
                rest //= factor
        if rest == 1:
            return number
        number += 1
