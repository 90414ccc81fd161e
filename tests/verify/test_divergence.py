"""Where decodes part: medians against answers worked out by hand, and in reports where exactness is not asked for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests import tiny
from tests.tiny import VARIANTS
from tfexport.decode.result import Hypothesis
from tfexport.nn.transformer import Transformer
from tfexport.runtime.eager import EagerSession
from tfexport.verify import Decodes, Divergence, Numbers, Report
from tfexport.verify._decodes import measure_divergence

SOURCES = [[3, 4], [5, 6, 7, 8], [9], [10, 11, 12], [13, 14]] * 3


@pytest.fixture(scope="module")
def eager() -> EagerSession:
    import torch

    model: Transformer = tiny.model(VARIANTS["post"], dtype=torch.float32)
    return EagerSession(model)


def hypothesis(*token_ids: int) -> Hypothesis:
    return Hypothesis(token_ids=token_ids, score=0.0, log_prob=0.0, finish_reason="length")


def margin(eager: Any, source: list[int], tokens: list[int]) -> float:
    """Ask for the two best logits behind `tokens`, in one step and without padding."""
    batch, prompt = eager.batch(), [eager.spec.tokens.start, *tokens]
    batch.add(tiny.sources(np.array([source]), np.ones((1, len(source)), bool)), [prompt])
    logits = batch.step(np.array(prompt[-1:]), eager.spec.vocab).logits[0]
    return float(np.sort(logits)[-1] - np.sort(logits)[-2])


def test_the_medians_cover_only_diverging_sequences(eager: EagerSession) -> None:
    expected = [hypothesis(5, 6, 7, 2) for _ in SOURCES]
    got = list(expected)
    changed = {0: (9, 6, 7, 2), 1: (5, 6, 9, 2), 3: (5, 6, 7, 9), 9: (5, 6, 7), 14: (5, 9, 7, 2)}
    for number, tokens in changed.items():
        got[number] = hypothesis(*tokens)
    found = measure_divergence(eager, SOURCES, expected, got)
    steps = {0: 0, 1: 2, 3: 3, 9: 3, 14: 1}
    margins = [margin(eager, SOURCES[number], [5, 6, 7][:step]) for number, step in steps.items()]
    assert found.equal == pytest.approx(10 / 15)
    assert found.position == 2
    assert found.margin == pytest.approx(np.median(margins), rel=1e-4)
    assert len({round(value, 4) for value in margins}) == 5


def test_sequences_diverge_at_different_steps_and_ends(eager: EagerSession) -> None:
    expected = [hypothesis(2) if number % 2 else hypothesis(5, 6, 7, 8) for number in range(len(SOURCES))]
    got = [hypothesis(9) if number % 2 else hypothesis(5, 6, 7, 9) for number in range(len(SOURCES))]
    found = measure_divergence(eager, SOURCES, expected, got)
    margins = [margin(eager, source, [] if n % 2 else [5, 6, 7]) for n, source in enumerate(SOURCES)]
    assert found == Divergence(0.0, 3.0, pytest.approx(float(np.median(margins)), rel=1e-4))


def test_no_sequence_diverges(eager: EagerSession) -> None:
    same = [hypothesis(5, 2) for _ in SOURCES]
    assert measure_divergence(eager, SOURCES, same, same) == Divergence(1.0, None, None)


def test_the_table_and_the_report_show_the_divergence() -> None:
    numbers = (Numbers("ort contrib", 0.01, 0.1, 0.1, "nowhere"),)
    parted = Decodes("ort contrib", "greedy", 40, 32, 7, "…", False, Divergence(0.8, 6.5, 0.25))
    equal = Decodes("ort contrib", "beam 4", 40, 40, 0, None, False, Divergence(1.0, None, None))
    report = Report("the eager model", 40, 0, numbers, (parted, equal))
    lines = report.lines()
    assert "32/40 exact, 7 ties, first difference at token 6.5, margin 2.5e-01  ·" in lines[2]
    assert "first difference" not in lines[3]
    assert max(map(len, lines)) <= 100
    assert [check["divergence"] for check in report.to_dict()["decodes"]] == [
        {"equal": 0.8, "position": 6.5, "margin": 0.25},
        {"equal": 1.0, "position": None, "margin": None},
    ]
