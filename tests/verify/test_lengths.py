"""Verification reaches the length limits: what differs only in long rows fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.stranger import modern
from tfexport.errors import ParityError
from tfexport.nn.eager import EagerModel, Reference
from tfexport.runtime.eager import EagerSession
from tfexport.runtime.registry import Graphs
from tfexport.verify import Report, Stages, VerifyConfig
from tfexport.verify._checks import _compare
from tfexport.verify._numbers import LONG_STEPS, long_batches, long_lengths

SPEC = replace(modern.SPEC, max_source_length=96, max_target_length=96)


def verified(reference: Reference, **changes: Any) -> Report:
    """Verify a module whose training path is `reference`."""
    module, spec = modern.module(), replace(SPEC, **changes)
    session = EagerSession(module, spec)
    stages = Stages(EagerModel(module, reference), Graphs({}, spec))
    return _compare(stages, [("twin", session)], VerifyConfig(samples=4), lambda line: None)


@contextmanager
def replaced(name: str, value: object) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modern, name, value)
        yield


def window(size: int) -> Reference:
    def attend(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor, **options: Any) -> Tensor:
        if query.shape[2] == key.shape[2]:
            distance = torch.arange(query.shape[2])[:, None] - torch.arange(key.shape[2])
            attn_mask = attn_mask & (distance.abs() < size)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=attn_mask, **options)

    def reference(model: Any, *inputs: Tensor) -> Tensor:
        with replaced("F", SimpleNamespace(scaled_dot_product_attention=attend, silu=F.silu)):
            result: Tensor = model(*inputs)
            return result

    return reference


def clamped(model: Any, *inputs: Tensor) -> Tensor:
    rotate: Callable[[Tensor, Tensor], Tensor] = modern.rotate
    with replaced("rotate", lambda x, positions: rotate(x, positions.clamp(max=60))):
        result: Tensor = model(*inputs)
        return result


@pytest.mark.parametrize("reference", [window(40), window(60), clamped], ids=["window 40", "window 60", "clamped"])
def test_a_training_path_that_differs_in_long_rows_fails(reference: Reference) -> None:
    report = verified(reference)
    assert not report.passed
    assert {check.stage for check in report.numbers if not check.passed} == {"eager cached", "twin"}


def test_the_same_path_passes_up_to_the_limits() -> None:
    report = verified(window(200))
    assert report.passed, report.problems()
    assert (report.source_tokens, report.target_tokens, report.is_capped) == (96, 96, False)
    (long,) = (check for check in report.decodes if check.method == "full length")
    assert (long.sequences, long.exact + long.ties) == (2, 2)


def test_a_reference_that_refuses_its_own_limit_is_one_line() -> None:
    def short(model: Any, source: Tensor, mask: Tensor, target: Tensor) -> Tensor:
        torch.zeros(70)[: source.shape[1]] + torch.zeros(source.shape[1])
        result: Tensor = model(source, mask, target)
        return result

    with pytest.raises(ParityError, match="the reference fails for 96 source and 96 target tokens"):
        verified(short)


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        (24, 24, [(24, 24)]),
        (64, 1, [(64, 1)]),
        (300, 100, [(64, 64), (128, 100), (256, 100), (300, 100)]),
        (9000, 70, [(64, 64), (128, 70), (256, 70), (512, 70), (1024, 70)]),
    ],
)
def test_lengths_grow_to_the_limits(source: int, target: int, expected: list[tuple[int, int]]) -> None:
    spec = replace(SPEC, max_source_length=source, max_target_length=target)
    assert long_lengths(spec) == expected
    batches = long_batches(spec, np.random.default_rng(0))
    assert [(batch.sources.source_len, batch.target_ids.shape[1]) for batch in batches] == expected
    assert all(1 <= batch.target_ids.shape[1] - batch.prefill + 1 <= LONG_STEPS + 1 for batch in batches)


def test_a_longer_limit_is_not_reported() -> None:
    report = Report("the eager model", 4, 0, (), (), source_tokens=1024, target_tokens=1024, is_capped=True)
    assert any(line.endswith("passed, compared up to 1024 source and 1024 target tokens") for line in report.lines())
