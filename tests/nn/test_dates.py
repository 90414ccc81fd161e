"""The model that comes with the project, on held-out dates of thirty-odd locales, through the whole chain."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

import tfexport
from tests.conftest import DATES
from tfexport.contract import Variant
from tfexport.model.model import Model

Rows = list[list[str]]


@pytest.fixture(scope="session")
def held_out() -> Rows:
    """Text, ISO date, locale and pattern of dates that training never saw."""
    return [line.split("\t") for line in (DATES / "heldout.tsv").read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def model(dates_bundle: Path) -> Iterator[Model]:
    with tfexport.load(dates_bundle, backend="ort", threads=1) as loaded:
        yield loaded


def share(model: Model, rows: Rows) -> float:
    """Return the exact matches in per cent."""
    results = model.generate([text for text, *_ in rows], batch_size=64)
    return 100 * sum(result.text == iso for result, (_, iso, *_) in zip(results, rows, strict=True)) / len(rows)


def test_at_least_99_per_cent_of_held_out_dates_are_read(model: Model, held_out: Rows) -> None:
    assert len(held_out) > 1500
    assert len({locale for _, _, locale, _ in held_out}) >= 20
    assert share(model, held_out) >= 99


def test_the_weights_are_below_8_mb() -> None:
    assert (DATES / "model.safetensors").stat().st_size < 8_000_000


def test_text_depends_neither_on_batch_mates_nor_on_padding(model: Model, held_out: Rows) -> None:
    texts = [text for text, *_ in held_out[:300]]
    alone = [result.text for text in texts for result in model.generate([text])]
    for batch_size in (7, 64):
        # The library sorts by length; turning its batches into a mix of lengths is up to the caller.
        together = [
            result.text
            for first in range(0, len(texts), batch_size)
            for result in model.generate(texts[first : first + batch_size], batch_size=batch_size)
        ]
        assert together == alone
    assert [result.text for result in model.generate(texts, batch_size=64)] == alone


def test_beams_and_all_variants_read_the_same_dates(model: Model, dates_bundle: Path, held_out: Rows) -> None:
    texts = [text for text, *_ in held_out[::10]]
    greedy = [result.token_ids for result in model.generate(texts)]
    beams = [result.token_ids for result in model.generate(texts, num_beams=4)]
    for variant in get_args(Variant):
        with tfexport.load(dates_bundle, backend="ort", variant=variant, threads=1) as loaded:
            assert [result.token_ids for result in loaded.generate(texts)] == greedy
            assert [result.token_ids for result in loaded.generate(texts, num_beams=4)] == beams


def test_fp16_keeps_the_accuracy(model: Model, dates_fp16: Path, held_out: Rows) -> None:
    with tfexport.load(dates_fp16, backend="ort", threads=1) as half:
        assert abs(share(half, held_out) - share(model, held_out)) <= 0.1


def test_special_tokens_in_a_text_are_text(model: Model) -> None:
    (result,) = model.generate(["3 mars 1999</s></s>"])
    assert result.finish_reason == "eos"
    with pytest.raises(tfexport.InputError, match="the text has no character"):
        model.generate(["\U0001f600\U0001f600"])
