"""Decoding step by step with a cache, and with padding and batch mates, says what the full forward says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests import tiny
from tests.tiny import VARIANTS, VOCAB
from tfexport.nn.cache import ConcatCache, KeyValue, RowCache
from tfexport.nn.source import CrossCache, PaddedSource
from tfexport.nn.transformer import Transformer

# Relative to the largest logit; float64 on both sides.
TOLERANCE = 1e-12

MODELS = {name: tiny.model(config) for name, config in VARIANTS.items()}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Transformer:
    return MODELS[request.param]


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= TOLERANCE * expected.abs().max()


@torch.no_grad()
def decode(model: Transformer, source_ids: Tensor, source_mask: Tensor, target_ids: Tensor, prefix: int) -> Tensor:
    """Return the logits after `prefix` tokens at once and each token behind them, [rows, len - prefix + 1, vocab]."""
    cross = CrossCache(model.encode(source_ids, PaddedSource(source_mask)), source_mask)
    cache = model.empty_cache(target_ids[:, :prefix])
    logits = [model.decode_step(target_ids[:, :prefix], cross, cache)]
    for position in range(prefix, target_ids.shape[1]):
        newest = target_ids[:, position : position + 1]
        cache = ConcatCache(cache.present, newest)
        logits.append(model.decode_step(newest, cross, cache))
    return torch.stack(logits, 1)


@pytest.mark.parametrize("prefix", [1, 2, 4, 7])
def test_steps_equal_full_forward(model: Transformer, prefix: int) -> None:
    batch = tiny.batch()
    with torch.no_grad():
        expected = model(*batch)[:, prefix - 1 :]
    assert_close(decode(model, *batch, prefix), expected)


@pytest.mark.parametrize("prefix", [1, 3])
def test_beams_share_the_source(model: Transformer, prefix: int) -> None:
    """Rows are batch · beams, while encoder keys and values stay one row a source."""
    beams, (source_ids, source_mask, _) = 4, tiny.batch()
    target_ids = torch.randint(VOCAB, (len(source_ids) * beams, 7), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(source_ids.repeat_interleave(beams, 0), source_mask.repeat_interleave(beams, 0), target_ids)
    assert_close(decode(model, source_ids, source_mask, target_ids, prefix), expected[:, prefix - 1 :])


def test_several_tokens_onto_a_past(model: Transformer) -> None:
    source_ids, source_mask, target_ids = batch = tiny.batch()
    with torch.no_grad():
        cross = CrossCache(model.encode(source_ids, PaddedSource(source_mask)), source_mask)
        first, second = target_ids[:, :2], target_ids[:, 2:6]
        cache = model.empty_cache(first)
        model.decode_step(first, cross, cache)
        logits = model.decode_step(second, cross, ConcatCache(cache.present, second))
        assert_close(logits, model(*batch)[:, 5])


@torch.no_grad()
@pytest.mark.parametrize("beams", [1, 2])
def test_rows_at_different_positions_equal_each_row_alone(model: Transformer, beams: int) -> None:
    """Rows join at their own time, take one or several tokens, and find their places full of what others left."""
    source_ids, source_mask, _ = tiny.batch()
    target_ids = torch.randint(VOCAB, (3 * beams, 20), generator=torch.Generator().manual_seed(1))
    rows = source_ids.repeat_interleave(beams, 0), source_mask.repeat_interleave(beams, 0), target_ids
    expected = model(*rows)
    cross = CrossCache(model.encode(source_ids, PaddedSource(source_mask)), source_mask)
    heads, d_k, d_v = model.config.num_kv_heads("decoder"), model.config.d_k("decoder"), model.config.d_v("decoder")
    key, value = (torch.randn(3, len(target_ids), heads, 24, width, dtype=torch.float64) for width in (d_k, d_v))
    buffers = list(map(KeyValue, key, value))
    places = [(buffer.key.data_ptr(), buffer.value.data_ptr()) for buffer in buffers]
    lengths = torch.zeros(len(target_ids), dtype=torch.int64)
    joins = torch.arange(len(target_ids)) * 2
    for step, target_len in enumerate((1, 2, 1, 1, 3, 1, 1, 1)):
        lengths[joins == step] = 0  # whatever they wrote before they joined is forgotten
        newest = target_ids.gather(1, lengths[:, None] + torch.arange(target_len))
        logits = model.decode_step(newest, cross, RowCache(buffers, newest, lengths))
        lengths += target_len
        assert_close(logits, expected[torch.arange(len(target_ids)), lengths - 1])
    assert len(set(lengths.tolist())) >= 3
    assert places == [(buffer.key.data_ptr(), buffer.value.data_ptr()) for buffer in buffers]


sources = st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8), min_size=1, max_size=4)


@settings(max_examples=40, deadline=None)
@given(rows=sources, padding=st.integers(0, 6), filler=st.integers(0, VOCAB - 1), name=st.sampled_from(list(MODELS)))
@torch.no_grad()
def test_padding_and_batch_mates_change_nothing(rows: list[list[int]], padding: int, filler: int, name: str) -> None:
    """Whatever fills the padding, each row reads as if it were alone."""
    model = MODELS[name]
    length = max(map(len, rows)) + padding
    source_ids = torch.tensor([row + [filler] * (length - len(row)) for row in rows])
    source_mask = torch.tensor([[True] * len(row) + [False] * (length - len(row)) for row in rows])
    target_ids = torch.tensor([(row * 5)[:5] + [filler] * padding for row in rows])
    together = model(source_ids, source_mask, target_ids)
    hidden = model.hidden_states(source_ids, source_mask)
    for i, row in enumerate(rows):
        alone = torch.tensor([row])
        assert_close(together[i : i + 1, :5], model(alone, torch.ones_like(alone).bool(), target_ids[i : i + 1, :5]))
        assert_close(hidden[i : i + 1, : len(row)], model.hidden_states(alone, torch.ones_like(alone).bool()))


def test_padded_rows_are_finite(model: Transformer) -> None:
    """A row without a single token is meaningless, but no NaN may reach its batch mates."""
    source_ids, source_mask, target_ids = tiny.batch()
    source_mask = source_mask.clone()
    source_mask[2] = False
    with torch.no_grad():
        assert model(source_ids, source_mask, target_ids).isfinite().all()
        assert model.hidden_states(source_ids, source_mask).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_stays_close_and_returns_float32(model: Transformer, dtype: torch.dtype) -> None:
    batch = tiny.batch()
    half = tiny.model(model.config, dtype=dtype)
    with torch.no_grad():
        expected, logits = model(*batch), half(*batch)
    assert logits.dtype == torch.float32
    # Bits of the mantissa, magnified by at most 3 layers: rounding alone, not another formula.
    assert (logits - expected).abs().mean() < 20 * torch.finfo(dtype).eps * expected.abs().mean()
