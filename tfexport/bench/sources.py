"""What is decoded while the clock runs: random ids of one length, or the texts of a file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from tfexport.bench.config import Cell
from tfexport.errors import InputError
from tfexport.model.model import Model
from tfexport.spec import ModelSpec

T = TypeVar("T")
# Enough that no cache knows them, few enough that they take no memory to speak of.
_BATCHES = 64
_MAX_TOKENS = 1_000_000


def random_batches(spec: ModelSpec, cell: Cell, seed: int) -> list[list[list[int]]]:
    """Draw batches of random ids, special tokens left out.

    Args:
        spec: of the model.
        cell: batch_size sources a batch, each of source_length tokens.
        seed: the same seed draws the same sources.
    """
    tokens = spec.tokens
    special = {tokens.pad, tokens.start, tokens.eos, tokens.unk}
    ordinary = np.array([token for token in range(spec.source_vocab) if token not in special] or [tokens.eos])
    shape = (cell.batch_size or 1, cell.source_length or 1)
    count = max(1, min(_BATCHES, _MAX_TOKENS // (shape[0] * shape[1])))
    batches: list[list[list[int]]] = np.random.default_rng(seed).choice(ordinary, (count, *shape)).tolist()
    return batches


def text_batches(sources: Sequence[list[int]], batch_size: int, seed: int) -> list[list[list[int]]]:
    """Lay texts out in batches of similar length, as `generate` does, the batches in random order.

    In the order of their length each window would differ from the last, and no run would be stable.
    """
    ordered = sorted(sources, key=len, reverse=True)
    batches = [ordered[start : start + batch_size] for start in range(0, len(ordered), batch_size)]
    return [batches[index] for index in np.random.default_rng(seed).permutation(len(batches))]


def shuffled(sources: Sequence[T], seed: int) -> list[T]:
    """Return sources in random order, as callers that know nothing of one another send them."""
    return [sources[index] for index in np.random.default_rng(seed).permutation(len(sources))]


def encoded(model: Model, texts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of texts.

    Raises:
        InputError: the bundle has no tokenizer, or cannot take a text.
    """
    if model.tokenizer is None:
        raise InputError("this bundle has no tokenizer, so --input cannot be read; leave it out for random sources")
    return [list(ids) for ids in model.tokenizer.encode(texts)]
