"""Spoken English digits: strings, voices of espeak-ng, and recordings with silence and noise as features."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
from espeak import Samples, Synthesizer
from numpy.typing import NDArray

from tfexport.features.audio import resample
from tfexport.features.config import AudioConfig
from tfexport.features.processor import FeatureProcessor

WORDS = "zero one two three four five six seven eight nine".split()
# Great Britain is "en" in espeak-ng.
ACCENTS, HELD_OUT_ACCENTS = ("en-us", "en"), ("en-gb-scotland",)
VOICES = tuple("m1 m2 m3 m4 m6 m7 m8 f1 f2 f4 f5 Alex Annie anika".split())
HELD_OUT_VOICES = tuple("m5 f3 Andy steph".split())
WORDS_PER_MINUTE = (120, 190)
MAX_DIGITS = 8
SNR_DB = (15, 40)
RATES = (8_000, 16_000, 22_050)
AUDIO = AudioConfig(
    kind="fbank", feature_dim=40, rate=8000, window=200, hop=80, subtract_mean=True, divide_by_std=True, max_seconds=10
)
CONDITIONS = {  # of held-out recordings
    "strings": (ACCENTS, VOICES),
    "strings and voices": (ACCENTS, HELD_OUT_VOICES),
    "strings, voices and accent": (HELD_OUT_ACCENTS, HELD_OUT_VOICES),
}
CHUNK = 500  # recordings in a file of the cache


@dataclass(frozen=True)
class Recording:
    """What the model reads and should write.

    Attributes:
        features: [frames, dim].
        digits: the spoken digits.
        starts: seconds at which each digit starts, [digits].
        snr_db: ratio of speech to noise; infinite without noise.
    """

    features: NDArray[Any]
    digits: str
    starts: NDArray[Any]
    snr_db: float


def draw(
    rng: np.random.Generator, accents: tuple[str, ...], voices: tuple[str, ...], *, held_out: bool
) -> tuple[str, str, str, int]:
    """Draw digits, and text, voice and words per minute with which espeak-ng speaks them.

    Lengths, accents, voices and speeds are equally likely. One string in ten of at least two digits is held out.
    """
    while True:
        digits = "".join(map(str, rng.integers(10, size=rng.integers(1, MAX_DIGITS + 1))))
        if held_out == (len(digits) > 1 and hashlib.sha256(digits.encode()).digest()[0] < 26):
            break
    has_pauses, text = rng.random() < 0.5, ""
    for digit in digits:
        text += WORDS[int(digit)] + (", " if has_pauses and rng.random() < 0.3 else " ")
    voice = f"{accents[rng.integers(len(accents))]}+{voices[rng.integers(len(voices))]}"
    return digits, text.strip(" ,"), voice, int(rng.integers(*WORDS_PER_MINUTE))


def record(speech: Samples, rate: int, rng: np.random.Generator) -> tuple[Samples, int, float, float]:
    """Add silence and in half of the cases noise.

    Returns samples, their rate, the seconds of silence before the speech, and the signal-to-noise ratio.
    """
    power, new_rate = float(np.mean(speech**2)), int(rng.choice(RATES))
    before, after = rng.uniform(0.05, 0.4, size=2)
    samples = np.pad(resample(speech, rate, new_rate), (int(before * new_rate), int(after * new_rate)))
    snr_db = float(rng.uniform(*SNR_DB)) if rng.random() < 0.5 else np.inf
    # The length of the speech varies slightly from run to run, but the next draws do not depend on it.
    noise = rng.spawn(1)[0].normal(size=len(samples))
    samples = samples + noise * np.sqrt(power / 10 ** (snr_db / 10))
    samples *= rng.uniform(0.1, 0.9) / np.abs(samples).max()
    return samples.astype(np.float32), new_rate, before, snr_db


def recordings(cache: Path, name: str, count: int) -> list[Recording]:
    """Return recordings for the training or of a condition, and keep them in files of the cache."""
    cache.mkdir(parents=True, exist_ok=True)
    found: list[Recording] = []
    for first in range(0, count, CHUNK):
        size = min(CHUNK, count - first)
        path = cache / f"{name.replace(', ', '-').replace(' ', '-')}-{first}-{size}.npz"
        if not path.exists():
            _write(path, name, size, np.random.default_rng((first, *name.encode())))
        with np.load(path) as stored:
            digits = stored["digits"].tolist()
            features = np.split(stored["features"], np.cumsum(stored["lengths"])[:-1])
            starts = np.split(stored["starts"], np.cumsum([len(each) for each in digits])[:-1])
            found += map(Recording, features, digits, starts, stored["snr_db"].tolist())
    return found


def _write(path: Path, name: str, size: int, rng: np.random.Generator) -> None:
    accents, voices = CONDITIONS.get(name, (ACCENTS, VOICES))
    synthesizer, processor, made = Synthesizer(), FeatureProcessor.from_config(AUDIO), list[Recording]()
    with click.progressbar(range(size), label=f"synthesis of {path.stem}") as bar:
        for _ in bar:
            digits, text, voice, speed = draw(rng, accents, voices, held_out=name in CONDITIONS)
            speech, starts = synthesizer.speak(text, voice, speed)
            samples, rate, before, snr_db = record(speech, synthesizer.rate, rng)
            features = processor.extract(samples, rate=rate)
            assert len(starts) == len(digits)
            made.append(Recording(features, digits, np.array(starts) + before, snr_db))
    np.savez(
        path.with_suffix(".tmp.npz"),
        features=np.concatenate([each.features for each in made]),
        lengths=[len(each.features) for each in made],
        digits=[each.digits for each in made],
        starts=np.concatenate([each.starts for each in made]),
        snr_db=[each.snr_db for each in made],
    )
    os.replace(path.with_suffix(".tmp.npz"), path)
