"""The task that quality is measured on: phrases in ten languages, none of the held-out ones in training."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from phrases.corpus import draw_pair, draw_phrase, language_token, write
from phrases.templates import KINDS, LANGUAGES, PHRASES
from phrases.training import TOKENS, build_tokenizer, held_out
from tokenizers import Tokenizer

import tfexport
from tests.conftest import ROOT


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return build_tokenizer(0, samples=300)


def test_every_phrase_exists_in_every_language() -> None:
    rng = np.random.default_rng(0)
    assert set(KINDS) == set(PHRASES)
    for phrase in (draw_phrase(rng) for _ in range(20)):
        texts = {write(phrase, language, wording=wording) for language in LANGUAGES for wording in (0, 1)}
        assert len(texts) == 2 * len(LANGUAGES), "no two languages or wordings say the same"
        assert not any("{" in text or "duration-" in text for text in texts)


def test_held_out_phrases_are_in_no_training_pair() -> None:
    rng = np.random.default_rng(0)
    trained = {draw_pair(rng, held_out=False).target for _ in range(500)}
    pairs = held_out(200, seed=0)
    assert pairs == held_out(200, seed=0)
    assert len({pair.source for pair in pairs}) == 200
    assert not trained & {pair.target for pair in pairs}
    assert all(pair.source.startswith(language_token(pair.target_language)) for pair in pairs)


def test_texts_survive_the_tokenizer(tokenizer: Tokenizer) -> None:
    assert [tokenizer.token_to_id(token) for token in ("<pad>", "<s>", "</s>", "<unk>")] == [
        TOKENS.pad, TOKENS.start, TOKENS.eos, TOKENS.unk,
    ]  # fmt: skip
    for pair in held_out(50, seed=1):
        source, target = tokenizer.encode(pair.source), tokenizer.encode(pair.target)
        assert source.tokens[0] == language_token(pair.target_language)
        assert tokenizer.decode(target.ids) == pair.target


@pytest.mark.skipif(not importlib.util.find_spec("sacrebleu"), reason="sacrebleu is not installed")
def test_a_comparison_reports_each_bundle(dates_bundle: Path) -> None:
    """Two "bundles" that are one: as exact, and the ratio of a thing to itself."""
    from phrases.comparison import Text, compare, report

    lines = [
        line.split("\t")[:2] for line in (ROOT / "models" / "dates" / "heldout.tsv").read_text("utf-8").splitlines()
    ]
    texts = [Text(*line) for line in lines[:40]]
    with tfexport.load(dates_bundle, threads=1) as model:
        found = compare({"one": model, "two": model}, texts, alone=4, rounds=2)
    table = report(found, {"one": 10**6, "two": 2 * 10**6}, [text.reference for text in texts]).splitlines()
    assert table[2].startswith("| one | 1.0 | 100.00 % | 100.00 % | 100.00 | 100.00 | 100.00 %, 100.00 % |")
    assert table[3].startswith("| two | 2.0 | 100.00 %")
