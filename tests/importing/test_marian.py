"""Marian's own files against what Marian computes, written in NumPy from its sources (`tests/importing/marian.py`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tfexport
from tests.importing.marian import (
    AVERAGE,
    OPTIONS,
    SSRU,
    VOCAB,
    Array,
    Marian,
    Quantized,
    random_weights,
    write_bin,
    write_npz,
)
from tfexport.errors import CheckpointError
from tfexport.export import export_bundle
from tfexport.export.config import ExportConfig
from tfexport.importing.config import ImportConfig
from tfexport.importing.importer import import_checkpoint
from tfexport.nn.directory import load_model

PRE = {"transformer-preprocess": "n", "transformer-postprocess": "da", "transformer-postprocess-top": "n"}
SEPARATE = {"tied-embeddings-all": False}
VARIANTS: dict[str, dict[str, Any]] = {
    "post": {},
    "pre": {**PRE, "transformer-ffn-activation": "relu"},
    "separate tables": {**SEPARATE, "transformer-ffn-activation": "gelu", "transformer-postprocess-emb": "nd"},
    "tied target": {**SEPARATE, "tied-embeddings": True},
    "sandwich": {"transformer-preprocess": "n", "transformer-postprocess": "dna"},
    "rms": {"transformer-preprocess": "r", "transformer-postprocess": "da", "transformer-postprocess-top": "r"},
    "trained positions": {"transformer-train-positions": True},
    "shared layers": {"transformer-tied-layers": [1, 1]},
    "average attention": AVERAGE,
    "ssru": SSRU,
    "ssru of a student": {**SSRU, **PRE, "transformer-tied-layers": [1, 1], "transformer-ffn-activation": "relu"},
}
UPSTREAM = {"float32": 0x404, "int8": 0x101, "quantized": 0x10001}
BROWSER = {"float32": 0x404, "int8": 0x101, "quantized": 0x4101}


def imported(path: Path, folder: Path) -> Path:
    import_checkpoint(path, folder / "model", ImportConfig())
    return folder / "model"


def assert_logits(directory: Path, marian: Marian) -> None:
    model, rng = load_model(directory).double(), np.random.default_rng(1)
    for source_len, target_len in ((1, 0), (3, 5), (12, 9)):
        source, target = (rng.integers(2, VOCAB, size).tolist() for size in (source_len, target_len))
        ids = torch.tensor([[*source, 0]])
        tokens = torch.tensor([[VOCAB, *target]])
        with torch.inference_mode():
            found = model(ids, torch.ones_like(ids, dtype=torch.bool), tokens)[0].numpy()
        expected = marian.logits([*source, 0], target)
        assert found[:, :VOCAB] == pytest.approx(expected, rel=1e-6, abs=1e-6)
        assert (found[:, VOCAB] < expected.min() - 1000).all()


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_are_those_of_marian(name: str, tmp_path: Path) -> None:
    options = {**OPTIONS, **VARIANTS[name]}
    weights = random_weights(options)
    assert_logits(imported(write_npz(tmp_path / "model.npz", options, weights), tmp_path), Marian(options, weights))


@pytest.mark.parametrize("types", [UPSTREAM, BROWSER])
def test_quantized_weights_are_those_that_marian_multiplies_by(types: dict[str, int], tmp_path: Path) -> None:
    weights = random_weights(OPTIONS)
    stored: dict[str, Array | Quantized] = {
        name: Quantized.of(array) if "_W" in name[-3:] or name == "Wemb" else array for name, array in weights.items()
    }
    stored["encoder_l1_self_Wq_QuantMultA"] = np.ones((1, 1), np.float32)
    path = write_bin(tmp_path / "model.intgemm.alphas.bin", OPTIONS, stored, types)
    read = {name: item.values if isinstance(item, Quantized) else item for name, item in stored.items()}
    assert_logits(imported(path, tmp_path), Marian(OPTIONS, read))


@pytest.mark.parametrize(
    "changes",
    [
        {"type": "amun"},
        {"transformer-postprocess": "dh"},
        AVERAGE | {"transformer-dim-aan": 2048},
        AVERAGE | {"transformer-aan-nogate": True},
        AVERAGE | {"transformer-aan-activation": "relu"},
        AVERAGE | PRE,
        {"transformer-decoder-autoreg": "rnn", "dec-cell": "gru"},
        {"transformer-ffn-depth": 3},
        {"transformer-heads": "two"},
        {"transformer-ffn-activation": "prelu"},
        {"tied-embeddings-all": False},
    ],
)
def test_other_models_are_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    path = write_npz(tmp_path / "model.npz", {**OPTIONS, **changes}, random_weights(OPTIONS))
    with pytest.raises(CheckpointError):
        imported(path, tmp_path)


def damaged(raw: bytes, rng: np.random.Generator) -> bytes:
    """Cut a file, or change some of its first bytes."""
    if rng.random() < 0.5:
        return raw[: rng.integers(8, len(raw))]
    changed = bytearray(raw)
    for place in rng.integers(8, 600, 3):
        changed[place] = rng.integers(256)
    return bytes(changed)


@pytest.mark.parametrize("is_binary", [True, False])
def test_a_damaged_file_is_refused_or_read(is_binary: bool, tmp_path: Path) -> None:
    path, weights, rng = tmp_path / "whole", random_weights(OPTIONS), np.random.default_rng(0)
    raw = (write_bin(path, OPTIONS, weights, UPSTREAM) if is_binary else write_npz(path, OPTIONS, weights)).read_bytes()
    refused = 0
    for number in range(60):
        path = tmp_path / f"damaged{number}.npz"
        path.write_bytes(damaged(raw, rng))
        try:
            import_checkpoint(path, tmp_path / f"model{number}", ImportConfig())
        except CheckpointError:
            refused += 1
    assert refused > 40


TEXTS = ["a house by the river", "the river and the house", "by a house", "a new river"]
WORDS = ["</s>", "<unk>", *sorted({word for text in TEXTS for word in text.split()})]


def write_sentencepiece(path: Path) -> Path:
    """Write a SentencePiece model with the special tokens of Marian."""
    sentencepiece = pytest.importorskip("sentencepiece")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_prefix=str(path), vocab_size=VOCAB, hard_vocab_limit=False,
        eos_id=0, unk_id=1, bos_id=-1, pad_id=-1, minloglevel=2,
    )  # fmt: skip
    return path.with_name(f"{path.name}.model").rename(path)


def write_yaml(path: Path) -> Path:
    """Write a vocabulary as `marian-vocab` does, with quotes only where YAML needs them."""
    path.write_text(
        "".join(f"{json.dumps(word) if i < 2 else word}: {i}\n" for i, word in enumerate(WORDS)), encoding="utf-8"
    )
    return path


@pytest.mark.parametrize(("is_sentencepiece", "decoder"), [(True, {}), (False, {}), (False, SSRU)])
def test_texts_are_those_of_marian(is_sentencepiece: bool, decoder: dict[str, Any], tmp_path: Path) -> None:
    """Sources end with the end token, and the unknown token is never generated."""
    options = {**OPTIONS, **decoder}
    weights = random_weights(options, seed=3)
    weights["decoder_ff_logit_out_b"][0, 1] = 5
    path = write_npz(tmp_path / "model.npz", options, weights)
    vocabulary = write_sentencepiece(tmp_path / "v.spm") if is_sentencepiece else write_yaml(tmp_path / "v.yml")
    split = {} if is_sentencepiece else {"tokenize": "words"}
    import_checkpoint(path, tmp_path / "model", ImportConfig(**split), tokenizer=vocabulary)
    export_bundle(str(tmp_path / "model"), tmp_path / "bundle", ExportConfig(variants=("contrib",)), verify=False)
    marian = Marian(options, weights)
    with tfexport.load(tmp_path / "bundle", threads=1) as model:
        assert model.tokenizer
        ids = model.tokenizer.encode(TEXTS)
        found = [result.token_ids for result in model.generate(TEXTS, max_new_tokens=8)]
    if is_sentencepiece:
        processor = pytest.importorskip("sentencepiece").SentencePieceProcessor(model_file=str(vocabulary))
        assert ids == [[*processor.encode(text), 0] for text in TEXTS]
    else:
        assert ids == [[*map(WORDS.index, text.split()), 0] for text in TEXTS]
    assert [list(one) for one in found] == [marian.translate(source, 8) for source in ids]
