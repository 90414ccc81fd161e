"""A model whose logits are known before it runs, with ties among them."""

from __future__ import annotations

import numpy as np
import torch

from tests import tiny
from tfexport.nn.config import TransformerConfig
from tfexport.nn.transformer import Transformer

# Of the sizes that ONNX Runtime's CUDA provider selects from by radix.
VOCAB = 600


def wide(vocab: int = VOCAB) -> TransformerConfig:
    """Configure a model of many words, whose sources may be longer than its short targets."""
    return tiny.config(max_source_length=11, max_target_length=6, target_vocab=vocab, d_model=64)


def planted(vocab: int, levels: int) -> tuple[Transformer, np.ndarray]:
    """Make a model whose logits are one row of so many different values, whatever it reads; return it and the row."""
    model = tiny.model(wide(vocab), dtype=torch.float32)
    row = np.random.default_rng(0).integers(0, levels, vocab).astype(np.float32)
    assert model.out is not None
    with torch.no_grad():
        model.out.weight.zero_()
        model.out.bias.copy_(torch.from_numpy(row))
    return model, row


def ranked(row: np.ndarray) -> np.ndarray:
    """Rank the ids of a row: highest first, equal ones in order of id."""
    return np.lexsort((np.arange(row.size), -row))
