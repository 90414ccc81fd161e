"""Decoding step by step with a cache, with padding and in batches equals the full forward pass."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests import tiny
from tests.tiny import VARIANTS, VOCAB
from tfexport.nn.cache import Cross, Source, row_cache
from tfexport.nn.config import model_spec
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


@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize("passes", [[1] * 7, [2] + [1] * 5, [2, 4, 1], [4, 1, 1, 1], [7]], ids=str)
@torch.no_grad()
def test_steps_equal_full_forward(model: Transformer, passes: list[int], beams: int) -> None:
    """Rows are batch · beams, while encoder keys and values have one row per source."""
    source_ids, source_mask, _ = tiny.batch()
    target_ids = torch.randint(VOCAB, (len(source_ids) * beams, 7), generator=torch.Generator().manual_seed(1))
    expected = model(source_ids.repeat_interleave(beams, 0), source_mask.repeat_interleave(beams, 0), target_ids)
    cross, cache = Cross(model.encode(source_ids, Source(source_mask)), source_mask), None
    for newest, position in zip(target_ids.split(passes, 1), accumulate(passes), strict=True):
        cache = cache.following(newest) if cache else model.empty_cache(newest)
        assert_close(model.decode_step(newest, cross, cache), expected[:, position - 1])


@torch.no_grad()
@pytest.mark.parametrize("beams", [1, 2])
def test_rows_at_different_positions_equal_single_rows(model: Transformer, beams: int) -> None:
    """Rows join at different times, take one or several tokens, and overwrite the values of earlier rows."""
    source_ids, source_mask, _ = tiny.batch()
    target_ids = torch.randint(VOCAB, (3 * beams, 20), generator=torch.Generator().manual_seed(1))
    rows = source_ids.repeat_interleave(beams, 0), source_mask.repeat_interleave(beams, 0), target_ids
    expected = model(*rows)
    cross = Cross(model.encode(source_ids, Source(source_mask)), source_mask)
    kind = model_spec(model.config, "fp32").cache
    buffers = [torch.randn(shape, dtype=torch.float64) for shape in kind.shapes(len(target_ids), 24)]
    places = [buffer.data_ptr() for buffer in buffers]
    lengths = torch.zeros(len(target_ids), dtype=torch.int64)
    joins = torch.arange(len(target_ids)) * 2
    for step, target_len in enumerate((1, 2, 1, 1, 3, 1, 1, 1)):
        lengths[joins == step] = 0  # the row joins
        newest = target_ids.gather(1, lengths[:, None] + torch.arange(target_len))
        logits = model.decode_step(newest, cross, row_cache(kind, buffers, newest, lengths))
        lengths += target_len
        assert_close(logits, expected[torch.arange(len(target_ids)), lengths - 1])
    assert len(set(lengths.tolist())) >= 3
    assert places == [buffer.data_ptr() for buffer in buffers]


sources = st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8), min_size=1, max_size=4)


@settings(max_examples=40, deadline=None)
@given(rows=sources, padding=st.integers(0, 6), filler=st.integers(0, VOCAB - 1), name=st.sampled_from(list(MODELS)))
@torch.no_grad()
def test_padding_and_batch_mates_change_nothing(rows: list[list[int]], padding: int, filler: int, name: str) -> None:
    """Each row is computed as if it were alone, whatever fills the padding."""
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
