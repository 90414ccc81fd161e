"""Build the models whose steps are timed, with random weights."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.gpu import decodes
from tfexport.contract import TokenIds
from tfexport.nn.config import StackConfig, TransformerConfig
from tfexport.nn.directory import save_model
from tfexport.nn.presets import build_preset
from tfexport.nn.transformer import Transformer

LARGE = "bart-large-cnn"


def large_config() -> TransformerConfig:
    """Return the sizes of BART-large-CNN (406 million weights), for sources of at most 512 tokens."""
    stack = StackConfig(layers=12, num_heads=16, d_ff=4096, norm_place="post", final_norm=False)
    sizes: dict[str, Any] = {"source_vocab": 50_264, "target_vocab": 50_264, "d_model": 1024}
    return TransformerConfig(
        max_source_length=512, max_target_length=142, encoder=stack, decoder=stack, embedding_norm=True,
        activation="gelu", tie_embeddings=True, tie_output=True, tokens=TokenIds(pad=1, start=2, eos=2, unk=3), **sizes,
    )  # fmt: skip


def random_model(name: str) -> Transformer:
    if name != LARGE:
        return build_preset(name)
    torch.manual_seed(0)
    return Transformer(large_config())


def source_of(name: str, work: Path) -> str:
    """Return what a bundle of a model is exported from."""
    if name != LARGE:
        return f"preset:{name}"
    path = work / "models" / name
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        save_model(random_model(name), path)
    return str(path)


def large_decodes() -> AbstractContextManager[Any]:
    """Decode 512 source tokens, mostly with four beams, as for summaries."""
    settings = ((1, 1), (1, 4), (8, 4))
    return mock.patch.multiple(decodes, SOURCE_LEN=512, SETTINGS=settings, LAUNCHES=settings[1:2], MODEL=f"{LARGE}, ")
