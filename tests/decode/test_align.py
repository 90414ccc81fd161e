"""Alignments equal the cross-attentions of transformers and PyTorch, in any batch."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests import tiny
from tests.decode.foreign import marian, t5
from tests.decode.scripted import ScriptedSession, table
from tests.nn.foreign import canonical_from_torch
from tfexport.contract import AlignmentHeads, TokenIds
from tfexport.decode.align import Alignment, align
from tfexport.errors import BackendError, ConfigError, InputError
from tfexport.nn.config import model_spec
from tfexport.runtime.eager import EagerSession

LAYERS, HEADS = 3, 4
LENGTH = 20
TOKENS = TokenIds(pad=0, start=1, eos=2)


def pairs(count: int, seed: int) -> tuple[list[list[int]], list[list[int]]]:
    rng = np.random.default_rng(seed)
    sources, targets = (
        [rng.integers(2, 47, rng.integers(1, 12)).tolist() for _ in range(count)] for _ in ("sources", "targets")
    )
    return sources, targets


def assert_same(found: list[Alignment], expected: list[np.ndarray]) -> None:
    for one, theirs in zip(found, expected, strict=True):
        assert one.weights.dtype == np.float32
        assert one.weights.shape == theirs.shape == (len(one.target_ids), len(one.source_ids))
        assert np.abs(one.weights - theirs).max() < 1e-4
        assert one.source_positions == tuple(one.weights.argmax(1))
        assert one.weights.sum(1) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(("make", "layer", "heads"), [(marian, -1, ()), (marian, 0, (3,)), (t5, 1, (2, 0))])
def test_alignments_are_those_of_transformers(make: Callable[..., tuple], layer: int, heads: tuple[int, ...]) -> None:
    theirs, ours = make(decoder_layers=LAYERS, heads=HEADS, attn_implementation="eager")
    sources, targets = pairs(13, seed=layer + 9)
    named = AlignmentHeads(layer=layer, heads=heads).within(model_spec(ours.config, "fp32"))
    session = EagerSession(ours, alignment=named)
    expected = []
    for source, target in zip(sources, targets, strict=True):
        read = torch.tensor([[theirs.config.decoder_start_token_id, *target[:-1]]])
        with torch.no_grad():
            output = theirs(input_ids=torch.tensor([source]), decoder_input_ids=read, output_attentions=True)
        weights = output.cross_attentions[layer][0].numpy()
        expected.append((weights[list(heads)] if heads else weights).mean(0))
    assert np.ptp(np.concatenate([one.ravel() for one in expected])) > 0.5, "equal weights prove nothing"
    for batch_size in (1, 4, 32):
        assert_same(align(session, sources, targets, batch_size=batch_size), expected)
    session.close()
    with pytest.raises(BackendError, match="session is closed"):
        align(session, sources, targets)


class TorchModel:
    """An `nn.Transformer` that returns its cross-attention, and the same canonical model."""

    def __init__(self) -> None:
        self.transformer = nn.Transformer(32, HEADS, 2, LAYERS, 48, 0.0, batch_first=True, dtype=torch.float64)
        self.embeddings = nn.Embedding(30, 32, dtype=torch.float64), nn.Embedding(34, 32, dtype=torch.float64)
        generator = nn.Linear(32, 34, dtype=torch.float64)
        for seed, module in enumerate((self.transformer, *self.embeddings, generator)):
            tiny.randomise(module, seed)
        self.positions = torch.randn(LENGTH, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        self.ours = canonical_from_torch(self.transformer.eval(), *self.embeddings, generator, self.positions, TOKENS)

    def weights(self, layer: int, source: list[int], read: list[int]) -> np.ndarray:
        """Run one pair, and the layer's attention again with `need_weights`: [heads, target, source]."""
        seen: list[tuple] = []
        attention = self.transformer.decoder.layers[layer].multihead_attn
        hook = attention.register_forward_pre_hook(lambda module, args: seen.append(args))
        embedded = [
            table(torch.tensor([ids])) * math.sqrt(32) + self.positions[: len(ids)]
            for table, ids in zip(self.embeddings, (source, read), strict=True)
        ]
        causal = torch.ones(len(read), len(read), dtype=torch.bool).triu(1)
        with torch.no_grad():
            self.transformer(*embedded, tgt_mask=causal)
            hook.remove()
            _, weights = attention(*seen[0], need_weights=True, average_attn_weights=False)
        return weights[0].numpy()


TORCH = TorchModel()
IDS = st.lists(st.integers(3, 29), min_size=1, max_size=LENGTH - 1)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(IDS, IDS), min_size=1, max_size=5),
    st.integers(-LAYERS, LAYERS - 1),
    st.lists(st.integers(0, HEADS - 1), unique=True).map(tuple),
)
def test_alignments_are_those_of_torch_in_every_batch(
    given_pairs: list[tuple[list[int], list[int]]], layer: int, heads: tuple[int, ...]
) -> None:
    named = AlignmentHeads(layer=layer, heads=heads).within(model_spec(TORCH.ours.config, "fp32"))
    found = align(EagerSession(TORCH.ours, alignment=named), *map(list, zip(*given_pairs, strict=True)))
    expected = [
        TORCH.weights(layer, source, [TOKENS.start, *target[:-1]])[list(named.heads)].mean(0)
        for source, target in given_pairs
    ]
    assert_same(found, expected)


def test_a_prefix_and_another_start_are_read_and_not_aligned() -> None:
    named = AlignmentHeads(layer=1).within(model_spec(TORCH.ours.config, "fp32"))
    session = EagerSession(TORCH.ours, alignment=named)
    whole, alone = align(session, [[5, 6, 7], [4]], [[8, 9, 10, 11], [3]], start=7)
    prefixed, empty = align(session, [[5, 6, 7], [4]], [[10, 11], [3]], prefixes=[[8, 9], []], start=7)
    assert prefixed.target_ids == (10, 11)
    assert prefixed.weights == pytest.approx(whole.weights[2:], abs=1e-6)
    assert empty.weights == pytest.approx(alone.weights, abs=1e-6)
    expected = TORCH.weights(1, [5, 6, 7], [7, 8, 9, 10]).mean(0)
    assert whole.weights == pytest.approx(expected, abs=1e-5)


def test_bad_pairs_are_named() -> None:
    """As in test_score.py, but a target needs no room for an end token."""
    session = EagerSession(TORCH.ours, alignment=AlignmentHeads(layer=0, heads=(0,)))
    with pytest.raises(InputError, match=r"pair 2: the target is empty.*; pair 3: the target has 21 tokens") as caught:
        align(session, [[5], [5], [5]], [[3] * LENGTH, [], [3] * (LENGTH + 1)])
    assert caught.value.indices == (1, 2)


def test_sessions_without_alignment_are_refused() -> None:
    with pytest.raises(ConfigError, match="backend scripted cannot return attention; use backend ort or eager"):
        align(ScriptedSession(5, table(5, {})), [[5]], [[3]])
    with pytest.raises(ConfigError, match="exported without alignment; export it again with --alignment LAYER"):
        align(EagerSession(TORCH.ours), [[5]], [[3]])


def test_nan_names_the_pair() -> None:
    broken = TorchModel().ours
    with torch.no_grad():
        broken.dec.layers[0].cross.q.bias[0] = math.nan
    session = EagerSession(broken, alignment=AlignmentHeads(layer=0, heads=(0,)))
    with pytest.raises(BackendError, match="NaN or infinite weights for the pair; check its weights"):
        align(session, [[5]], [[3]])
    with pytest.raises(BackendError, match="NaN or infinite weights for pair 1; check its weights"):
        align(session, [[5], [6]], [[3], [3]])
