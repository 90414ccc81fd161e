"""The canonical model can be trained: dropout, gradients and a falling loss."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from tests import tiny
from tests.tiny import VARIANTS
from tfexport.nn.transformer import Transformer


def loss_of(model: Transformer, source_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy; the decoder's inputs are the labels, shifted right after the start token."""
    tokens = model.config.tokens
    target_ids = labels.roll(1, 1)
    target_ids[:, 0] = tokens.start
    logits = model(source_ids, source_ids != tokens.pad, target_ids)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=tokens.pad)


@pytest.mark.parametrize("name", VARIANTS)
def test_dropout_acts_in_training_only(name: str) -> None:
    torch.manual_seed(0)
    batch, model = tiny.batch(), tiny.model(replace(VARIANTS[name], dropout=0.3))
    with torch.no_grad():
        assert torch.equal(model(*batch), model(*batch))
        assert torch.equal(model(*batch), tiny.model(VARIANTS[name])(*batch))
        model.train()
        assert not torch.allclose(model(*batch), model(*batch))


@pytest.mark.parametrize("place", ["embedding", "residual", "feed-forward", "attention"])
def test_dropout_acts_in_each_place(place: str) -> None:
    torch.manual_seed(0)
    batch, model = tiny.batch(), tiny.model(VARIANTS["post"]).train()
    block = model.enc.blocks[0]
    with torch.no_grad():
        before = model(*batch)
        model.attention_dropout = 0.5 if place == "attention" else 0.0
        layers = {"embedding": model.enc.dropout, "residual": block.dropout, "feed-forward": block.ffn.dropout}
        for name, layer in layers.items():
            layer.p = 0.5 if place == name else 0.0
        assert not torch.allclose(model(*batch), before)


@pytest.mark.parametrize("name", VARIANTS)
def test_gradients_reach_every_trainable_parameter(name: str) -> None:
    model = tiny.model(VARIANTS[name]).train()
    source_ids = tiny.batch().source_ids
    loss_of(model, source_ids, source_ids.clone()).backward()
    for parameter_name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            assert parameter_name.endswith(".pos")
            continue
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.isfinite().all(), parameter_name
        # A bias on the keys, or on their norm, shifts all scores of a query alike, which softmax does not see.
        if not parameter_name.endswith(("k.bias", "k_norm.bias")):
            assert parameter.grad.abs().max() > 1e-9, parameter_name


def test_copying_is_learnt() -> None:
    torch.manual_seed(0)
    model = Transformer(tiny.config(embedding_scale=32**0.5)).train()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    losses = []
    for _ in range(60):
        source_ids = torch.randint(3, 12, (32, 5))
        loss = loss_of(model, source_ids, source_ids.clone())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    # Guessing among the nine tokens costs log 9 = 2.2; reading the source is what goes below.
    assert losses[0] > 2.2
    assert losses[-1] < 1.5
