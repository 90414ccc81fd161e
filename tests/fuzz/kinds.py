"""All kinds of input, and what they are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from tests import tiny
from tests.conftest import DATES
from tests.fuzz import bundles, checkpoints, options, requests, tokenizers
from tests.fuzz.kind import Kind
from tfexport.nn.directory import save_model

# Each takes the folder of originals and an empty one of its own.
KINDS: dict[str, Callable[[Path, Path], Kind]] = {
    "bundle-manifest": bundles.damaged("manifest.json"),
    "bundle-graph": bundles.damaged("decoder_contrib.onnx"),
    "bundle-weights": bundles.damaged("weights.safetensors"),
    "bundle-tokenizer": bundles.damaged("tokenizer.json"),
    "bundle-sealed": bundles.sealed("manifest.json"),
    "engine-manifest": bundles.damaged("engines/*/engine.json", "with-engine", bundles.engines_of),
    "engine-plan": bundles.damaged("engines/*/decoder_static.plan", "with-engine", bundles.engines_of),
    "engine-sealed": bundles.sealed("engines/*/engine.json", "with-engine", bundles.engines_of),
    "weights-safetensors": checkpoints.weights("weights.safetensors", is_summed=False),
    "weights-torch": checkpoints.weights("weights.pt", is_summed=True),
    "weights-legacy": checkpoints.weights("weights.legacy", is_summed=False),
    "reference": checkpoints.references,
    "model-config": checkpoints.directories,
    "model-texts": checkpoints.texts,
    "layout": checkpoints.layouts,
    "layout-json": checkpoints.layouts_json,
    "tokenizer-words": tokenizers.json_of("characters.json"),
    "tokenizer-bpe": tokenizers.json_of("byte_pairs.json"),
    "tokenizer-unigram": tokenizers.json_of("unigram.json"),
    "tokenizer-spm": tokenizers.read_as("spm.model"),
    "tokenizer-list": tokenizers.read_as("tokens.txt"),
    "generation-json": options.defaults,
    "options": options.generation,
    "requests": requests.kind,
}


def prepare(folder: Path) -> None:
    """Make all originals, small ones."""
    folder.mkdir()
    torch.manual_seed(0)
    vocab = 388
    small = {"layers": 1, "d_ff": 16, "num_heads": 2}
    config = replace(
        tiny.config(encoder=small, decoder=small, d_model=16, max_source_length=64, max_target_length=24),
        source_vocab=vocab,
        target_vocab=vocab,
    )
    model = tiny.model(config, dtype=torch.float32)
    save_model(model, folder / "model", tokenizer=DATES / "tokenizer.json")
    bundles.prepare(folder / "model", folder)
    checkpoints.prepare(folder)
    tokenizers.prepare(folder)
