"""Decoding says what Hugging Face `generate` says, id for id, on a Marian of the same random weights."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, MarianConfig, MarianMTModel

from tests.models.foreign import canonical_from_marian
from tfexport.decode.offline import decode
from tfexport.decode.result import Hypothesis
from tfexport.generation import DecodeConfig
from tfexport.runtime.eager import EagerSession

# As in Marian: end 0, padding last and also the start of the decoder.
EOS, PAD, VOCAB = 0, 47, 48
NUM_TEXTS, MAX_NEW_TOKENS = 200, 24


@dataclass(frozen=True)
class Pair:
    theirs: MarianMTModel
    session: EagerSession
    sources: list[list[int]]


@pytest.fixture(scope="module")
def pair() -> Pair:
    torch.manual_seed(0)
    config = MarianConfig(
        vocab_size=VOCAB,
        decoder_vocab_size=VOCAB,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_position_embeddings=64,
        init_std=1.0,
        pad_token_id=PAD,
        eos_token_id=EOS,
        decoder_start_token_id=PAD,
        forced_eos_token_id=None,
        tie_word_embeddings=False,
    )
    # float64 on both sides: the same logits to the last bit of float32, so that every id must agree.
    theirs = MarianMTModel(config).double().eval()
    with torch.no_grad():
        make_talkative(theirs)
    return Pair(theirs, EagerSession(canonical_from_marian(theirs)), random_sources())


def make_talkative(model: MarianMTModel) -> None:
    """Let texts differ and end at many lengths: sharp attention, logits of spread 1.5 around 0, a likely end."""
    for name, parameter in model.named_parameters():
        if "q_proj" in name:
            parameter.mul_(4)
        if "fc2" in name:
            parameter.mul_(0.3)
    ids = torch.randint(1, PAD, (256, 12))
    logits = model(input_ids=ids, decoder_input_ids=ids.flip(0)).logits
    scale = 1.5 / logits.std((0, 1))
    model.lm_head.weight.mul_(scale[:, None])
    model.final_logits_bias.copy_(-logits.mean((0, 1)) * scale)
    model.final_logits_bias[0, EOS] += 1.5


def random_sources() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(1, PAD, rng.integers(1, 13)).tolist() for _ in range(NUM_TEXTS)]


@torch.inference_mode()
def generate(pair: Pair, config: DecodeConfig, prefix: list[int] | None = None) -> list[list[tuple[list[int], float]]]:
    """Return ids without the start token, and score, of each text's hypotheses, by Hugging Face."""
    given = config.to_dict()
    seed, suppress = given.pop("seed"), given.pop("suppress_tokens")
    settings = GenerationConfig(
        **given,
        suppress_tokens=list(suppress) or None,
        pad_token_id=PAD,
        eos_token_id=EOS,
        decoder_start_token_id=PAD,
        bad_words_ids=None,
        forced_eos_token_id=None,
        return_dict_in_generate=True,
        output_scores=True,
    )
    assert seed == 0
    length = max(map(len, pair.sources))
    ids = torch.tensor([source + [PAD] * (length - len(source)) for source in pair.sources])
    mask = torch.tensor([[1] * len(source) + [0] * (length - len(source)) for source in pair.sources])
    prompt = {"decoder_input_ids": torch.tensor([[PAD, *prefix]] * len(pair.sources))} if prefix else {}
    out = pair.theirs.generate(input_ids=ids, attention_mask=mask, generation_config=settings, **prompt)
    scores = out.sequences_scores if config.num_beams > 1 else torch.full((len(out.sequences),), torch.nan)
    found = list(zip(out.sequences[:, 1:].tolist(), scores.tolist(), strict=True))
    n = config.num_return_sequences
    return [found[start : start + n] for start in range(0, len(found), n)]


def assert_equal(theirs: list[list[tuple[list[int], float]]], ours: list[list[Hypothesis]]) -> None:
    for text, (expected, found) in enumerate(zip(theirs, ours, strict=True)):
        padded = [[*one.token_ids, *[PAD] * (len(expected[0][0]) - len(one.token_ids))] for one in found]
        scores = [score for _, score in expected]
        # torch.topk leaves open which of two equal scores comes first.
        tied = {score for score in scores if scores.count(score) > 1}
        in_order = [ids for ids, score in expected if score not in tied]
        assert [ids for ids, score in zip(padded, scores, strict=True) if score not in tied] == in_order, f"text {text}"
        assert sorted(padded) == sorted(ids for ids, _ in expected), f"text {text}"
        if not np.isnan(scores[0]):
            np.testing.assert_allclose([one.score for one in found], scores, rtol=1e-6, err_msg=f"text {text}")


def check(pair: Pair, prefix: list[int] | None = None, **settings: object) -> list[list[Hypothesis]]:
    config = DecodeConfig.from_dict({"max_new_tokens": MAX_NEW_TOKENS, **settings})
    prefixes = [prefix] * len(pair.sources) if prefix else None
    ours = decode(pair.session, pair.sources, config, prefixes=prefixes, batch_size=100)
    assert_equal(generate(pair, config, prefix), ours)
    return ours


FILTERS = {
    "n-grams": {"no_repeat_ngram_size": 2},
    "words": {"no_repeat_ngram_size": 1},
    "penalty": {"repetition_penalty": 1.3},
    "reward": {"repetition_penalty": 0.8},
    "at least": {"min_new_tokens": 6},
    "first": {"forced_bos_token_id": 5},
    "suppressed": {"suppress_tokens": [7, 8, 9, 30, EOS]},
    "all": {
        "no_repeat_ngram_size": 3,
        "repetition_penalty": 1.2,
        "min_new_tokens": 4,
        "forced_bos_token_id": 9,
        "suppress_tokens": [4, 20],
    },
}


def test_greedy(pair: Pair) -> None:
    found = check(pair)
    reasons = [hypotheses[0].finish_reason for hypotheses in found]
    assert len({hypotheses[0].token_ids for hypotheses in found}) > NUM_TEXTS / 2, "the model must say many things"
    assert 20 < reasons.count("eos") < NUM_TEXTS - 20, "and end some of them"


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [0.6, 1.0, 2.0])
@pytest.mark.parametrize("num_beams", [2, 4, 5])
def test_beams(pair: Pair, num_beams: int, length_penalty: float, early_stopping: object) -> None:
    check(
        pair,
        num_beams=num_beams,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        num_return_sequences=num_beams,
    )


@pytest.mark.parametrize("length_penalty", [-1.0, 0.0])
@pytest.mark.parametrize("early_stopping", [False, True, "never"])
def test_beams_where_length_does_not_help(pair: Pair, length_penalty: float, early_stopping: object) -> None:
    check(pair, num_beams=3, length_penalty=length_penalty, early_stopping=early_stopping, num_return_sequences=2)


@pytest.mark.parametrize("num_beams", [1, 4])
@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS.keys())
def test_filters(pair: Pair, filters: dict[str, object], num_beams: int) -> None:
    check(pair, num_beams=num_beams, num_return_sequences=num_beams, **filters)


@pytest.mark.parametrize("num_beams", [1, 4])
def test_prefix_is_history(pair: Pair, num_beams: int) -> None:
    check(pair, [5, 6, 5], num_beams=num_beams, no_repeat_ngram_size=2, repetition_penalty=1.2, min_new_tokens=3)


@pytest.mark.parametrize("num_beams", [1, 4])
def test_one_new_token(pair: Pair, num_beams: int) -> None:
    found = check(pair, num_beams=num_beams, num_return_sequences=num_beams, max_new_tokens=1)
    assert all(len(hypothesis.token_ids) == 1 for hypotheses in found for hypothesis in hypotheses)
