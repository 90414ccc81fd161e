"""Features of audio, compared with the feature extractors of transformers, and the audio files themselves."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from transformers import Speech2TextFeatureExtractor, Wav2Vec2FeatureExtractor, WhisperFeatureExtractor

from tests.features.signals import RATE, signals, wav
from tfexport.errors import BackendError, ConfigError, InputError
from tfexport.features.audio import resample
from tfexport.features.config import AudioConfig
from tfexport.features.processor import FeatureProcessor
from tfexport.importing.huggingface.processor import read_processor

TONE = np.sin(np.arange(RATE) * 0.3).astype(np.float32) * 0.5
WAVEFORM = FeatureProcessor.from_config(AudioConfig(kind="waveform", feature_dim=1, max_seconds=2))


def processor_of(extractor: object) -> FeatureProcessor:
    return FeatureProcessor.from_config(read_processor(extractor.to_dict()))


def error_of(ours: np.ndarray, theirs: np.ndarray) -> float:
    assert (ours.shape, ours.dtype) == (theirs.shape, np.float32)
    return float(np.abs(ours - theirs).max())


@pytest.mark.parametrize(("bands", "seconds"), [(80, 3), (128, 3), (80, 2)])
def test_log_mel_is_that_of_whisper(bands: int, seconds: int) -> None:
    theirs = WhisperFeatureExtractor(feature_size=bands, chunk_length=seconds)
    # Longer audio is cut as there; by default it is an error.
    config = AudioConfig.from_dict({**read_processor(theirs.to_dict()).to_dict(), "max_seconds": 3})
    assert config.shape == (seconds * 100, bands)
    ours = FeatureProcessor.from_config(config)
    errors, torch_errors = [], []
    for _, signal in signals():
        found = ours.extract(signal, rate=RATE)
        padded = np.pad(signal, (0, max(0, seconds * RATE - len(signal))))[: seconds * RATE]
        errors.append(error_of(found, theirs._np_extract_fbank_features([padded], "cpu")[0].T))
        torch_errors.append(error_of(found, theirs(signal, sampling_rate=RATE)["input_features"][0].T))
    assert max(errors) < 1e-6
    assert max(torch_errors) < 5e-4  # PyTorch transforms in float32, which loses the weakest of 8 decades


def test_whole_windows_of_whisper() -> None:
    theirs = WhisperFeatureExtractor()
    signal = np.concatenate([signal for _, signal in signals()])[: 30 * RATE]
    found = processor_of(theirs).extract(wav(signal))
    signal = np.rint(signal * 2**15).clip(-(2**15), 2**15 - 1).astype(np.float32) / 2**15
    assert error_of(found, theirs._np_extract_fbank_features([signal], "cpu")[0].T) < 1e-6


@pytest.mark.parametrize("options", [{}, {"normalize_vars": False}, {"do_ceptral_normalize": False}])
def test_filter_banks_are_those_of_speech2text(options: dict[str, bool]) -> None:
    theirs = Speech2TextFeatureExtractor(**options)
    ours = processor_of(theirs)
    for name, signal in signals():
        with np.errstate(divide="ignore", invalid="ignore"):
            expected = theirs(signal, sampling_rate=RATE)["input_features"][0]
        if np.isfinite(expected).all():
            # Equal except for sums that a processor orders otherwise; a tone has nearly the same energy in all frames.
            assert error_of(ours.extract(signal, rate=RATE), expected) < (0.1 if "tone" in name else 1e-4), name
        else:
            with pytest.raises(InputError):
                ours.extract(signal, rate=RATE)


@pytest.mark.parametrize("normalize", [True, False])
def test_waveforms_are_those_of_moonshine(normalize: bool) -> None:
    theirs = Wav2Vec2FeatureExtractor(do_normalize=normalize)
    ours = processor_of(theirs)
    for _, signal in signals():
        expected = theirs(signal, sampling_rate=RATE)["input_values"][0][:, None]
        assert error_of(ours.extract(signal, rate=RATE), expected) < 1e-6


@pytest.mark.parametrize("rate", [8000, 11_025, 22_050, 24_000, 32_000, 44_100, 44_101, 48_000, 96_000])
def test_resampling_keeps_low_frequencies_and_removes_those_above(rate: int) -> None:
    def tones(at: int) -> np.ndarray:
        t = np.arange(at) / at
        return sum(0.1 * np.sin(2 * np.pi * f * t + f) for f in (100, 1234.5, min(rate, RATE) * 0.45))

    t = np.arange(rate) / rate
    alias = 0.5 * np.sin(2 * np.pi * 8200 * t) if rate > 16_400 else 0.0
    found = resample((tones(rate) + alias).astype(np.float32), rate, RATE)
    assert found.shape == (RATE,)
    assert np.abs(found - tones(RATE))[800:-800].max() < 1e-4  # the ends of the signal are steps
    assert resample(TONE[:1001], RATE, rate).shape == (-(-1001 * rate // RATE),)


def test_speech_at_another_rate_has_nearly_the_same_features(tmp_path: Path) -> None:
    if not shutil.which("espeak-ng"):
        pytest.skip("espeak-ng is not installed")
    path = tmp_path / "speech.wav"
    subprocess.run(["espeak-ng", "-w", path, "features of speech"], check=True)
    ours = processor_of(WhisperFeatureExtractor(chunk_length=3))
    found = ours.extract(path)
    samples = np.frombuffer(path.read_bytes()[44:], "<i2").astype(np.float32) / 2**15
    assert found.shape == (300, 80)
    assert np.abs(found - ours.extract(resample(samples, 22_050, 48_000), rate=48_000)).mean() < 0.01


@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("channels", [1, 2, 3])
def test_wav_files_of_whole_numbers(width: int, channels: int, tmp_path: Path) -> None:
    samples = np.stack([TONE * factor for factor in (1.0, -0.5, 0.25)[:channels]], axis=1)
    path = tmp_path / "audio.wav"
    path.write_bytes(wav(samples, width=width))
    found = WAVEFORM.extract(path)
    assert error_of(found, samples.mean(axis=1, keepdims=True)) <= 2.0 ** (1 - 8 * width) + 1e-7
    np.testing.assert_array_equal(found, WAVEFORM.extract(path.read_bytes()))


@pytest.mark.parametrize(
    ("kind", "subtype"), [("WAV", "FLOAT"), ("WAVEX", "PCM_24"), ("FLAC", "PCM_16"), ("AIFF", "PCM_16")]
)
def test_other_formats(kind: str, subtype: str) -> None:
    soundfile = pytest.importorskip("soundfile")
    file = io.BytesIO()
    soundfile.write(file, np.stack([TONE, TONE], axis=1), RATE, format=kind, subtype=subtype)
    assert error_of(WAVEFORM.extract(file.getvalue()), TONE[:, None]) < 1e-4
    for size in (30, len(file.getvalue()) // 2):
        with pytest.raises(InputError):
            WAVEFORM.extract(file.getvalue()[:size])


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(BackendError, match="tfexport\\[audio\\]"):
        WAVEFORM.extract(b"fLaC" + bytes(100))


def header(**fields: int) -> bytes:
    """Return a WAV file of one second whose header has other numbers."""
    data = bytearray(wav(TONE))
    places = {"header_size": (16, 4), "channels": (22, 2), "rate": (24, 4), "bits": (34, 2), "size": (40, 4)}
    for name, value in fields.items():
        place, size = places[name]
        data[place : place + size] = value.to_bytes(size, "little")
    return bytes(data)


@pytest.mark.parametrize(
    ("source", "rate"),
    [
        (b"", None),
        (b"RIFF", None),
        (b"not audio at all", None),
        (b"\x89PNG\r\n\x1a\n" + bytes(100), None),
        (wav(TONE)[:40], None),
        (wav(TONE)[:-1], None),
        (wav(TONE)[:20_000], None),
        (wav(TONE[:0]), None),
        (header(header_size=2**31), None),
        (header(channels=0), None),
        (header(channels=1000), None),
        (header(rate=10), None),
        (header(rate=2**31), None),
        (header(bits=0), None),
        (header(bits=64), None),
        (header(size=2**32 - 1), None),
        (wav(np.tile(TONE, 3)), None),
        (wav(TONE), RATE),
        (TONE[:0], RATE),
        (TONE, 1),
        (TONE, 16_000.0),
        (np.tile(TONE, 3), RATE),
        (np.array([0.1, np.nan]), RATE),
        (np.array([0.1, np.inf]), RATE),
        (np.array([[np.inf, -np.inf], [1e300, 0.0]]), RATE),
        (TONE * 2**15, RATE),
        (TONE.astype(np.int16), RATE),
        (TONE.reshape(1, 1, -1), RATE),
        (TONE, None),
        (np.tile(TONE, 3)[:, None], None),
        (np.full((5, 1), np.nan, np.float32), None),
        (np.ones((5, 1), np.int32), None),
        (["speech.wav"], None),
        ("missing.wav", None),
        ("/dev/zero", None),
    ],
)
def test_bad_audio_is_one_line(source: object, rate: int | None) -> None:
    with pytest.raises(InputError) as caught:
        WAVEFORM.extract(source, rate=rate)
    assert "\n" not in str(caught.value)


def test_an_hour_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "hour.wav"
    path.write_bytes(header(size=3600 * 2 * RATE))
    with path.open("r+b") as file:
        file.truncate(44 + 3600 * 2 * RATE)
    with pytest.raises(InputError) as caught:
        WAVEFORM.extract(path)
    assert "3600.0 s" in caught.value.problems[0]


def test_too_little_audio_for_filter_banks() -> None:
    ours = processor_of(Speech2TextFeatureExtractor())
    for samples in (TONE[:399], TONE[:400], np.zeros(8000, np.float32)):
        with pytest.raises(InputError):
            ours.extract(samples, rate=RATE)


def test_computed_features_are_returned() -> None:
    ours = processor_of(WhisperFeatureExtractor(chunk_length=1))
    features = ours.extract(TONE, rate=RATE)
    np.testing.assert_array_equal(ours.extract(features.astype(np.float64)), features)
    np.testing.assert_array_equal(WAVEFORM.extract(TONE[:, None]), TONE[:, None])


@pytest.mark.parametrize(
    "values",
    [
        {"kind": "waveform", "feature_dim": 80},
        {"kind": "log_mel", "feature_dim": 80},
        {"kind": "fbank", "feature_dim": 80, "num_frames": 100},
        {"kind": "log_mel", "feature_dim": 80, "num_frames": 100, "subtract_mean": True},
        {"kind": "log_mel", "feature_dim": 80, "num_frames": 1},
        {"kind": "log_mel", "feature_dim": 80, "num_frames": 100, "rate": 8000},
        {"kind": "waveform", "feature_dim": 1, "subtract_mean": True},
        {"kind": "mfcc", "feature_dim": 80},
    ],
)
def test_contradictory_configurations(values: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        AudioConfig(**values)
    assert len(caught.value.problems) == 1
