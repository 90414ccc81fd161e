"""Recurrent decoder layers on long, extreme sequences; their logits are compared in tests/importing/test_marian.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import tiny
from tfexport.errors import ConfigError
from tfexport.nn.cache import linear_scan
from tfexport.nn.config import model_spec

MODEL = tiny.model(tiny.VARIANTS["ssru"])


@pytest.mark.parametrize("gate", [-60.0, -3.0, 0.0, 8.0, 40.0])
@pytest.mark.parametrize("length", [1, 2, 7, 1000])
def test_joined_steps_are_as_exact_as_single_steps(length: int, gate: float) -> None:
    """In float32, compared with float64, also if products of factors underflow."""
    generator = torch.Generator().manual_seed(0)
    factor = torch.sigmoid(gate + torch.randn(2, length, 5, generator=generator))
    term = (1 - factor) * torch.randn(2, length, 5, generator=generator)
    before = torch.randn(2, 5, generator=generator)

    def single_steps(dtype: torch.dtype) -> Tensor:
        state, states = before.to(dtype), []
        for step in range(length):
            state = factor[:, step].to(dtype) * state + term[:, step].to(dtype)
            states.append(state)
        return torch.stack(states, 1)

    joined, found = linear_scan(factor, term, length)
    expected = single_steps(torch.float64)
    error, usual = ((x - expected).abs().max() for x in (joined * before[:, None] + found, single_steps(torch.float32)))
    assert error <= 2 * usual + 2e-7 * expected.abs().max()


def test_gradients_are_those_of_single_steps() -> None:
    factor, term = (torch.rand(2, 9, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    state, states = torch.zeros(2, 3, dtype=torch.float64), []
    for step in range(9):
        state = factor[:, step] * state + term[:, step]
        states.append(state)
    weights = torch.rand(2, 9, 3, dtype=torch.float64)
    expected = torch.autograd.grad((torch.stack(states, 1) * weights).sum(), (factor, term))
    found = torch.autograd.grad((linear_scan(factor, term, 9)[1] * weights).sum(), (factor, term))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_the_state_of_a_layer_is_one_vector() -> None:
    kind = model_spec(MODEL.config, "fp16").cache
    assert kind.names("past") == ["past_state.0", "past_state.1"]
    assert (kind.shapes(3, 100), kind.dtype, kind.grows) == ([(3, 32), (3, 32)], "float32", False)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"encoder": replace(MODEL.config.encoder, mixer="ssru")}, "encoder.mixer is ssru, which only a decoder can"),
        ({"relative_bias": "t5"}, "relative_bias is t5 with decoder.mixer ssru"),
        ({"relative_bias": "alibi"}, "relative_bias is alibi with decoder.mixer ssru"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        replace(MODEL.config, **changes)
