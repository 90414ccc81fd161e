"""Tiny Whisper directories with random weights: model, generation settings, feature extractor and tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    GenerationConfig,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperTokenizer,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tests import tiny

RATE, POSITIONS = 16_000, 50  # a window is one second
_NAMES = ["endoftext", "startoftranscript", "en", "de", "fr", "translate", "transcribe", "startofprev", "nospeech"]
_NAMES += ["notimestamps", *(f"{step * 0.02:.2f}" for step in range(POSITIONS + 1))]
ID = {name: 256 + number for number, name in enumerate(_NAMES)}
EOS, START, NO_TIMESTAMPS, VOCAB = ID["endoftext"], ID["startoftranscript"], ID["notimestamps"], 256 + len(_NAMES)
TIMESTAMPS = list(range(NO_TIMESTAMPS + 1, VOCAB))
TOKENS: dict[str, Any] = {
    "bos_token_id": EOS,
    "eos_token_id": EOS,
    "pad_token_id": EOS,
    "decoder_start_token_id": START,
}
ENGLISH: dict[str, Any] = {
    **TOKENS,
    "begin_suppress_tokens": [32, EOS],
    "forced_decoder_ids": [[1, NO_TIMESTAMPS]],
    "is_multilingual": False,
    "max_initial_timestamp_index": 10,
    "max_length": 40,
    "no_repeat_ngram_size": 2,  # texts of random weights would repeat a token until the limit
    "no_timestamps_token_id": NO_TIMESTAMPS,
    "suppress_tokens": [1, 2, 7, START, *(ID[name] for name in ("translate", "transcribe", "startofprev", "nospeech"))],
}
MULTILINGUAL: dict[str, Any] = {
    **ENGLISH,
    "forced_decoder_ids": [[1, None], [2, ID["transcribe"]]],
    "is_multilingual": True,
    "lang_to_id": {f"<|{name}|>": ID[name] for name in ("en", "de", "fr")},
    "task_to_id": {name: ID[name] for name in ("transcribe", "translate")},
}


def write(folder: Path, generation: dict[str, Any] | None = None, **changes: Any) -> Path:
    """Write a directory as `save_pretrained` does; `generation` is its generation_config.json."""
    sizes = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in _SIZES.items()}
    config = WhisperConfig(
        vocab_size=VOCAB,
        num_mel_bins=16,
        d_model=32,
        max_source_positions=POSITIONS,
        **{"max_target_positions": 48, "begin_suppress_tokens": None, **sizes, **TOKENS, **changes},
    )
    model = WhisperForConditionalGeneration(config)
    tiny.randomise(model, seed=12)  # whose texts differ, end, and are of all languages
    with torch.no_grad():
        model.model.decoder.embed_tokens.weight[EOS] *= 2  # so that some texts end
    model.tie_weights()
    model.generation_config = GenerationConfig(**(MULTILINGUAL if generation is None else generation))
    model.save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=config.num_mel_bins, chunk_length=1).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


_SIZES = {"layers": 2, "attention_heads": 4, "ffn_dim": 48}


def tokenizer() -> WhisperTokenizer:
    """Return a tokenizer of bytes, with the special tokens of Whisper."""
    made = WhisperTokenizer({character: byte for byte, character in bytes_to_unicode().items()}, [])
    special = len(_NAMES) - POSITIONS - 1
    made.add_tokens([f"<|{name}|>" for name in _NAMES[:special]], special_tokens=True)
    made.add_tokens([f"<|{name}|>" for name in _NAMES[special:]])
    return made


def load(folder: Path) -> Any:
    """Load a directory with transformers itself, in float64."""
    return WhisperForConditionalGeneration.from_pretrained(folder).double().eval()


def waveforms(count: int, seed: int = 0) -> list[np.ndarray]:
    """Return voices in noise of 0.05 to 1 s, float32 [samples]."""
    rng, found = np.random.default_rng(seed), []
    for _ in range(count):
        time = np.arange(int(rng.uniform(0.05, 1) * RATE)) / RATE
        tones = sum(rng.normal() * np.sin(2 * np.pi * rng.uniform(80, 4000) * time) for _ in range(4))
        found.append((0.1 * tones + 0.01 * rng.normal(size=time.size)).astype(np.float32))
    return found


def features(folder: Path, signals: Sequence[np.ndarray]) -> np.ndarray:
    """Return the features of transformers, float32 [signals, frames, bands]."""
    extractor = WhisperFeatureExtractor.from_pretrained(folder)
    found: np.ndarray = extractor(list(signals), sampling_rate=RATE, return_tensors="np")["input_features"]
    return found.transpose(0, 2, 1)
